"""STree, arXiv:2505.14969: state-space layers verify a token tree. Five files explain it, in this order:

tests/helpers/stree_page.py (the paper's algorithm on a page), plan.py (selection for a target), forward/ssm/scan.py
(the recurrence: row by row, all at once, in chunks), forward/ssm/state.py (states, tails and replay of many requests),
forward/ssm/layout.py (common interface of transformers' mixers).
"""
