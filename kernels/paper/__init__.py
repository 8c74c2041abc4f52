"""The paper's own algorithms, for comparison: TwELL for inference, hybrid lists for training.

They compute the results of the kernels beside this folder, in the paper's formats.
"""
