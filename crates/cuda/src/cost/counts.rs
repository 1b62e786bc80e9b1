//! Instructions by class, and what each takes of a multiprocessor's units.

/// Instructions of a warp by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// f16 products with f32 sums (`HMMA.16816.F32`).
    pub tensor_f16: usize,
    /// Other tensor instructions.
    pub tensor_other: usize,
    /// Fragments from shared memory (`LDSM`).
    pub ldsm: usize,
    /// Loads from shared memory.
    pub lds: usize,
    /// Stores to shared memory.
    pub sts: usize,
    /// Loads from global memory.
    pub ldg: usize,
    /// Stores to global memory.
    pub stg: usize,
    /// Copies from global to shared memory.
    pub ldgsts: usize,
    /// f32 arithmetic.
    pub fp32: usize,
    /// f16 arithmetic.
    pub fp16: usize,
    /// Integer additions, logic, shifts, comparisons and selections.
    pub integer: usize,
    /// Integer multiply-adds; the compiler also moves and shifts with them.
    pub imad: usize,
    /// Conversions between number formats.
    pub conversion: usize,
    /// Branches, barriers, waits, and the rest.
    pub control: usize,
    /// Clocks of the shared-memory pipe, 128 bytes each, without bank conflicts.
    pub shared_clocks: usize,
}

const FP32: [&str; 9] = [
    "FADD", "FMUL", "FFMA", "FMNMX", "FSETP", "FSEL", "FCHK", "FSET", "MUFU",
];
const FP16: [&str; 6] = ["HADD2", "HMUL2", "HFMA2", "HSETP2", "HMNMX2", "HSET2"];
const CONVERSION: [&str; 8] = ["I2F", "F2I", "F2F", "I2FP", "F2FP", "FRND", "I2I", "F2IP"];
const INTEGER: [&str; 24] = [
    "IADD3", "IADD", "LOP3", "LOP", "SHF", "SHL", "SHR", "LEA", "ISETP", "SEL", "PRMT", "IMNMX",
    "VIMNMX", "IABS", "FLO", "POPC", "BREV", "BMSK", "SGXT", "PLOP3", "VOTE", "ISCADD", "VIADD",
    "VABSDIFF",
];

impl Counts {
    /// Adds an instruction. One that a constantly false predicate switches off takes an issue slot
    /// and nothing else.
    pub fn add(&mut self, opcode: &str, never: bool) {
        let stem = opcode.split('.').next().unwrap_or(opcode);
        if never {
            self.control += 1;
            return;
        }
        // A warp moves 32 times the width of one thread.
        let wide = if opcode.contains(".128") {
            4
        } else if opcode.contains(".64") {
            2
        } else {
            1
        };
        match stem {
            "HMMA" if opcode.ends_with(".F32") => self.tensor_f16 += 1,
            "HMMA" | "IMMA" | "QMMA" | "OMMA" | "BMMA" | "DMMA" => self.tensor_other += 1,
            "LDSM" => {
                self.ldsm += 1;
                let matrices = opcode.rsplit('.').next().and_then(|last| last.parse().ok());
                self.shared_clocks += matrices.unwrap_or(1);
            }
            "LDS" => {
                self.lds += 1;
                self.shared_clocks += wide;
            }
            "STS" | "STSM" => {
                self.sts += 1;
                self.shared_clocks += wide;
            }
            "LDGSTS" => {
                self.ldgsts += 1;
                self.shared_clocks += wide;
            }
            "LDG" | "LD" | "LDL" => self.ldg += 1,
            "STG" | "ST" | "STL" | "RED" | "ATOM" | "ATOMG" => self.stg += 1,
            "IMAD" | "IMUL" | "IDP" => self.imad += 1,
            _ if FP32.contains(&stem) => self.fp32 += 1,
            _ if FP16.contains(&stem) => self.fp16 += 1,
            _ if CONVERSION.contains(&stem) => self.conversion += 1,
            _ if INTEGER.contains(&stem) => self.integer += 1,
            _ => self.control += 1,
        }
    }

    /// Tensor instructions of every kind.
    pub fn tensor(&self) -> usize {
        self.tensor_f16 + self.tensor_other
    }

    /// All instructions.
    pub fn total(&self) -> usize {
        self.classes().iter().map(|(_, count)| count).sum()
    }

    /// Name and count of each class.
    pub fn classes(&self) -> [(&'static str, usize); 14] {
        [
            ("hmma", self.tensor_f16),
            ("mma", self.tensor_other),
            ("ldsm", self.ldsm),
            ("lds", self.lds),
            ("sts", self.sts),
            ("ldg", self.ldg),
            ("stg", self.stg),
            ("ldgsts", self.ldgsts),
            ("f32", self.fp32),
            ("f16", self.fp16),
            ("int", self.integer),
            ("imad", self.imad),
            ("cvt", self.conversion),
            ("other", self.control),
        ]
    }

    /// Every count with that of `other` by `of`.
    fn with(&self, other: &Counts, of: impl Fn(usize, usize) -> usize) -> Counts {
        Counts {
            tensor_f16: of(self.tensor_f16, other.tensor_f16),
            tensor_other: of(self.tensor_other, other.tensor_other),
            ldsm: of(self.ldsm, other.ldsm),
            lds: of(self.lds, other.lds),
            sts: of(self.sts, other.sts),
            ldg: of(self.ldg, other.ldg),
            stg: of(self.stg, other.stg),
            ldgsts: of(self.ldgsts, other.ldgsts),
            fp32: of(self.fp32, other.fp32),
            fp16: of(self.fp16, other.fp16),
            integer: of(self.integer, other.integer),
            imad: of(self.imad, other.imad),
            conversion: of(self.conversion, other.conversion),
            control: of(self.control, other.control),
            shared_clocks: of(self.shared_clocks, other.shared_clocks),
        }
    }

    /// Without the instructions of a part.
    pub fn minus(&self, part: &Counts) -> Counts {
        self.with(part, usize::saturating_sub)
    }

    /// With the instructions of a part, `times` over.
    pub fn plus(&self, part: &Counts, times: usize) -> Counts {
        self.with(part, |own, other| own + times * other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_have_classes_and_take_shared_memory_by_their_width() {
        let mut counts = Counts::default();
        for opcode in [
            "HMMA.16816.F32",
            "HMMA.16816.F16",
            "LDSM.16.M88.4",
            "LDS.128",
            "LDS.U16",
            "STS.64",
            "LDGSTS.E.BYPASS.128",
            "IMAD.WIDE.U32",
            "LOP3.LUT",
            "HFMA2.MMA",
            "F2FP.F16.F32.PACK_AB",
            "BAR.SYNC.DEFER_BLOCKING",
        ] {
            counts.add(opcode, false);
        }
        counts.add("LDS", true);
        assert_eq!((counts.tensor_f16, counts.tensor_other), (1, 1));
        assert_eq!((counts.lds, counts.ldgsts, counts.imad), (2, 1, 1));
        assert_eq!((counts.integer, counts.fp16, counts.conversion), (1, 1, 1));
        assert_eq!((counts.control, counts.total()), (2, 13));
        assert_eq!(counts.shared_clocks, 4 + 4 + 1 + 2 + 4);
        assert_eq!(counts.plus(&counts, 2).minus(&counts).total(), 26);
    }
}
