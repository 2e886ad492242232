"""Training of the judge's head (``foretoken train judge``): labels from answers to questions, their store, the fit."""
