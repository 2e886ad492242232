"""LongSpec, arXiv:2502.17421. Serving is five files, in this order:

network.py (the paper's forward pass), drafter.py (how a draft grows), runner.py (one level of many requests),
drafting/ring.py (the sliding window's keys), forward/target_kv.py (the target layer that is read). Training adds
noisy.py and train.py; command.py is its command line.
"""
