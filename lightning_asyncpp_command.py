"""Where the ``asyncpp`` command begins: outside of the package, whose import takes seconds.

``import lightning_asyncpp`` registers the strategies with Lightning and with Fabric, for which it imports both; it has
to do so at once, since nothing tells it when somebody makes a Trainer. Only a help screen has no use for that. So here,
and nowhere else, the modules of the package are imported before its ``__init__.py`` has run, and unless the help that
they print ends the process, it runs then, before anything else does.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec


def main() -> None:
    """Run the command with the arguments of the process."""
    if "lightning_asyncpp" not in sys.modules:
        _import_package()
    from lightning_asyncpp.cli import main as run

    run()


def _import_package() -> None:
    """Import it, unless a help screen is all that is asked for.

    Raises:
        SystemExit: it was, and is printed.
    """
    spec = find_spec("lightning_asyncpp")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'lightning_asyncpp'")
    package = sys.modules[spec.name] = module_from_spec(spec)
    from lightning_asyncpp.cli import announce, answer_help

    answer_help(sys.argv[1:])
    announce(sys.argv[1:])
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
