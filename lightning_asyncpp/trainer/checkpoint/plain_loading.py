"""``load_from_checkpoint`` for modules whose checkpoints hold plain values: nothing that a file names is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from lightning_asyncpp.trainer.checkpoint.saved_arguments import instead_of_saved

if TYPE_CHECKING:
    _class_method = classmethod
else:  # Lightning's, which nobody can call on an instance by mistake
    _class_method = type(vars(LightningModule)["load_from_checkpoint"])


class LoadsPlainValues(LightningModule):
    """A LightningModule that is made from a file without importing, calling or compiling what the file names."""

    @_class_method
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a module from a file, as Lightning does, but for what the file names to be imported, called or compiled.

        Arguments of ``never_from_a_checkpoint`` have their defaults, or are given here.

        Raises:
            StorageError: the file cannot be read without running code, and ``weights_only`` is not False.
            ConfigurationError: others name something to import.
        """
        if weights_only is not False:
            weights_only = True
            if hparams_file is None:
                kwargs |= instead_of_saved(cls, checkpoint_path, kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)
