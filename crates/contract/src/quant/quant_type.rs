//! The storage formats: ids, names and block sizes.

/// A storage format, by its GGUF type id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(non_camel_case_types, reason = "these are the names of the format")]
pub enum QuantType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// 4 bits, scale.
    Q4_0,
    /// 4 bits, scale and minimum.
    Q4_1,
    /// 5 bits, scale.
    Q5_0,
    /// 5 bits, scale and minimum.
    Q5_1,
    /// 8 bits, scale.
    Q8_0,
    /// 2 bits in super-blocks of 256.
    Q2_K,
    /// 3 bits in super-blocks of 256.
    Q3_K,
    /// 4 bits in super-blocks of 256.
    Q4_K,
    /// 5 bits in super-blocks of 256.
    Q5_K,
    /// 6 bits in super-blocks of 256.
    Q6_K,
    /// 4 bits through a nonlinear table.
    IQ4_NL,
    /// 4 bits through a nonlinear table, in super-blocks of 256.
    IQ4_XS,
    /// 2.06 bits: points of a set, a scale for 32.
    IQ2_XXS,
    /// 2.31 bits: points of a set, a scale for 16.
    IQ2_XS,
    /// 3.06 bits: points of a set, a scale for 32.
    IQ3_XXS,
    /// 1.56 bits: points of a set, a scale for 32.
    IQ1_S,
    /// 3.44 bits: points of a set, a scale for 32.
    IQ3_S,
    /// 2.56 bits: points of a set, a scale for 16.
    IQ2_S,
    /// 1.75 bits: points of a set, a scale for 16.
    IQ1_M,
    /// 1.69 bits: three levels, one scale.
    TQ1_0,
    /// 2.06 bits: three levels, one scale.
    TQ2_0,
    /// 4-bit floats, a power of two for 32.
    MXFP4,
    /// 4-bit floats, an 8-bit float for 16.
    NVFP4,
}

impl QuantType {
    /// Every format, in the order of the GGUF ids.
    pub const ALL: [QuantType; 26] = [
        QuantType::F32,
        QuantType::F16,
        QuantType::Q4_0,
        QuantType::Q4_1,
        QuantType::Q5_0,
        QuantType::Q5_1,
        QuantType::Q8_0,
        QuantType::Q2_K,
        QuantType::Q3_K,
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
        QuantType::IQ2_XXS,
        QuantType::IQ2_XS,
        QuantType::IQ3_XXS,
        QuantType::IQ1_S,
        QuantType::IQ4_NL,
        QuantType::IQ3_S,
        QuantType::IQ2_S,
        QuantType::IQ4_XS,
        QuantType::IQ1_M,
        QuantType::BF16,
        QuantType::TQ1_0,
        QuantType::TQ2_0,
        QuantType::MXFP4,
        QuantType::NVFP4,
    ];

    /// `(GGUF id, name, values per block, bytes per block)`.
    const fn properties(self) -> (u32, &'static str, usize, usize) {
        match self {
            QuantType::F32 => (0, "F32", 1, 4),
            QuantType::F16 => (1, "F16", 1, 2),
            QuantType::Q4_0 => (2, "Q4_0", 32, 18),
            QuantType::Q4_1 => (3, "Q4_1", 32, 20),
            QuantType::Q5_0 => (6, "Q5_0", 32, 22),
            QuantType::Q5_1 => (7, "Q5_1", 32, 24),
            QuantType::Q8_0 => (8, "Q8_0", 32, 34),
            QuantType::Q2_K => (10, "Q2_K", 256, 84),
            QuantType::Q3_K => (11, "Q3_K", 256, 110),
            QuantType::Q4_K => (12, "Q4_K", 256, 144),
            QuantType::Q5_K => (13, "Q5_K", 256, 176),
            QuantType::Q6_K => (14, "Q6_K", 256, 210),
            QuantType::IQ4_NL => (20, "IQ4_NL", 32, 18),
            QuantType::IQ4_XS => (23, "IQ4_XS", 256, 136),
            QuantType::BF16 => (30, "BF16", 1, 2),
            QuantType::IQ2_XXS => (16, "IQ2_XXS", 256, 66),
            QuantType::IQ2_XS => (17, "IQ2_XS", 256, 74),
            QuantType::IQ3_XXS => (18, "IQ3_XXS", 256, 98),
            QuantType::IQ1_S => (19, "IQ1_S", 256, 50),
            QuantType::IQ3_S => (21, "IQ3_S", 256, 110),
            QuantType::IQ2_S => (22, "IQ2_S", 256, 82),
            QuantType::IQ1_M => (29, "IQ1_M", 256, 56),
            QuantType::TQ1_0 => (34, "TQ1_0", 256, 54),
            QuantType::TQ2_0 => (35, "TQ2_0", 256, 66),
            QuantType::MXFP4 => (39, "MXFP4", 32, 17),
            QuantType::NVFP4 => (40, "NVFP4", 64, 36),
        }
    }

    /// Whether [`super::quantize_row_weighted`] makes use of an importance matrix.
    pub const fn takes_importance(self) -> bool {
        matches!(
            self,
            QuantType::IQ2_XXS
                | QuantType::IQ2_XS
                | QuantType::IQ2_S
                | QuantType::IQ3_XXS
                | QuantType::IQ3_S
                | QuantType::IQ1_S
                | QuantType::IQ1_M
        )
    }

    /// The id in a GGUF file.
    pub const fn id(self) -> u32 {
        self.properties().0
    }

    /// The format of a GGUF id, if it is one of ours.
    pub fn from_id(id: u32) -> Option<QuantType> {
        QuantType::ALL.into_iter().find(|ty| ty.id() == id)
    }

    /// The format's name as GGUF tools print it.
    pub const fn name(self) -> &'static str {
        self.properties().1
    }

    /// Values per block.
    pub const fn block_values(self) -> usize {
        self.properties().2
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.properties().3
    }

    /// Bytes of a row of `cols` values; `cols` must be a multiple of [`QuantType::block_values`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_values() * self.block_bytes()
    }
}
