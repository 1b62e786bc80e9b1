//! RMSNorm, residual and activation quantising.
