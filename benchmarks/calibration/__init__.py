"""Fits the simulator's constants on recorded times of real TPUs, and tells how well they hold on others.

`python -m benchmarks.calibration compile` needs tokamax, whose kernels the records are of; `fit` and `report` do
not. See docs/simulate.md.
"""
