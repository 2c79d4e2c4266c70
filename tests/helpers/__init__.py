"""What tests of several folders share.

| what | where |
| --- | --- |
| a run of the engine or of the oracle, and their comparison | ``cases``, ``random_cases``, ``engine`` |
| a run of the Trainer, of Fabric or of the oracle, and their comparison | ``trainer``, ``fabric``, ``oracle`` |
| modules for the Trainer | ``modules``, ``projections`` (weights change after an update), ``recorded`` (layers sleep) |
| models of this package and of others, tokenizers, folders as of ``save_pretrained`` | ``models`` |
| runs that go on from a checkpoint, or are evaluated in between | ``resumable``, ``evaluations`` |
| processes that stay, that fail, that are programs | ``pool``, ``failing``, ``programs`` |
| devices that are not there | ``fake_device`` |
| what this process does once for all runs | ``spared`` |
"""
