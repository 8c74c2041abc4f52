"""This repository's evidence: tables of recorded rows, figures of tables, and recording scripts.

    analysis    rows to tables (DataFrames)
    plots       a table to a figure, one function a figure
    record      measures and trains on a GPU what data/ holds; `trainings` lists the runs
    keep        reduces a trained run to the small files of data/

It is in no wheel: a clone has it, installed with `pip install -e .`. twell never imports it.
"""
