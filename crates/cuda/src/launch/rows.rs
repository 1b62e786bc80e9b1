//! The head's rows: argmax, candidates, log-sum-exp.
