//! Attention over the cache: norm, rope and write; decode, tree and prefill.
