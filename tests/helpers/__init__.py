"""Helpers that tests of several folders share.

| what | where |
| --- | --- |
| a run of the engine or of the oracle, and their comparison | ``cases``, ``random_cases``, ``engine`` |
| a run of the Trainer, of Fabric or of the oracle, and their comparison | ``trainer``, ``fabric``, ``oracle`` |
| modules for the Trainer | ``modules``, ``projections`` (weights change after an update), ``recorded`` (layers sleep) |
| models of this package and of others, tokenizers, text, folders as written by ``save_pretrained`` | ``models`` |
| runs that resume from a checkpoint, or are evaluated in between | ``resumable``, ``evaluations`` |
| persistent processes, processes that fail, programs | ``pool``, ``failing``, ``programs`` |
| fake devices | ``fake_device`` |
| patches that avoid work repeated for every run | ``spared`` |
"""
