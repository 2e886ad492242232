"""STree, arXiv:2505.14969: state-space layers verify a token tree. Five files explain it, in this order:

tree_scan.py (the paper's algorithm on a page), plan.py (when a target uses it), forward/ssm/scan.py (the recurrence as
it runs: row by row, all at once, in chunks), forward/ssm/state.py (states, tails and replay of many requests),
forward/ssm/layout.py (what mixers of transformers have in common).
"""
