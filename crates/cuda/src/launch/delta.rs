//! The gated delta rule and its convolution.
