//! Integers as fields of kernel parameters.

/// Two 32-bit fields of a struct.
pub(in crate::launch) fn pair(low: usize, high: usize) -> u64 {
    u64::from(narrow(low)) | u64::from(narrow(high)) << 32
}

/// A 32-bit field.
pub(in crate::launch) fn narrow(n: usize) -> u32 {
    u32::try_from(n).expect("matrices have fewer than 2^36 values")
}
