//! A fault of the compiler, looked for in machine code.
//!
//! A `cp.async` with an L2 policy is an `LDGSTS` whose policy is in uniform registers. Where its
//! shared address is a thread's own value plus a uniform one, NVRTC 13.0.88 has a form for sm_90
//! and later that takes both from neighbouring registers, and in some loops from registers that
//! nothing has written: `LDGSTS [R15+UR0], desc[UR1][R8.64]`, which copies to anywhere or is an
//! illegal instruction. A kernel that counts its shared addresses along, each thread its own, does
//! without the form. None has it, so every one is a fault.

/// Bytes of an instruction, from sm_70 on.
const INSTRUCTION: usize = 16;
/// Opcode of `LDGSTS` with a uniform register in its address, and the bits of an opcode.
const UNIFORM_COPY: u64 = 0xdae;
const OPCODE: u64 = 0xfff;
/// `SHT_PROGBITS` and `SHF_EXECINSTR` of a section of machine code.
const PROGRAM_BITS: usize = 1;
const EXECUTABLE: usize = 4;

/// How many copies to shared memory in the machine code of `cubin` have a uniform register in their
/// address; `None` if it is not a 64-bit ELF file.
pub fn uniform_copies(cubin: &[u8]) -> Option<usize> {
    if cubin.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    // Section headers: where they begin, bytes of one, how many.
    let (begin, bytes) = (number(cubin, 0x28, 8)?, number(cubin, 0x3a, 2)?);
    let mut copies = 0;
    for index in 0..number(cubin, 0x3c, 2)? {
        let header = cubin
            .get(begin.checked_add(index * bytes)?..)?
            .get(..bytes)?;
        let (kind, flags) = (number(header, 4, 4)?, number(header, 8, 8)?);
        if kind != PROGRAM_BITS || flags & EXECUTABLE == 0 {
            continue;
        }
        let (from, len) = (number(header, 0x18, 8)?, number(header, 0x20, 8)?);
        let code = cubin.get(from..)?.get(..len)?;
        let is_uniform = |instruction: &&[u8]| {
            let word = instruction.first_chunk::<8>().copied();
            word.is_some_and(|word| u64::from_le_bytes(word) & OPCODE == UNIFORM_COPY)
        };
        copies += code.chunks_exact(INSTRUCTION).filter(is_uniform).count();
    }
    Some(copies)
}

/// The number in `len` bytes from `at` on, the lowest first.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let bytes = bytes.get(at..at + len)?.iter().rev();
    let number = bytes.fold(0, |all, byte| all << 8 | u64::from(*byte));
    usize::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with a section of data and one of code, both of these instructions.
    fn elf(instructions: &[u64]) -> Vec<u8> {
        let mut body = Vec::new();
        for word in instructions {
            body.extend(word.to_le_bytes());
            body.extend([0; 8]);
        }
        let mut file = vec![0; 64];
        file[..5].copy_from_slice(b"\x7fELF\x02");
        file[0x28..0x30].copy_from_slice(&(64 + body.len() as u64).to_le_bytes());
        file[0x3a] = 64;
        file[0x3c] = 2;
        file.extend(&body);
        for flags in [0, EXECUTABLE as u64] {
            let mut header = [0; 64];
            header[4] = 1;
            header[8..16].copy_from_slice(&flags.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&64_u64.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(body.len() as u64).to_le_bytes());
            file.extend(header);
        }
        file
    }

    #[test]
    fn copies_with_a_uniform_address_are_counted_in_code_only() {
        // LDGSTS [R9], desc[UR12][R4.64], and the faulty [R15+UR0], desc[UR1][R8.64].
        let (plain, faulty) = (0x04_09_7f_ae, 0x08_0f_7d_ae);
        assert_eq!(uniform_copies(&elf(&[plain, plain])), Some(0));
        assert_eq!(uniform_copies(&elf(&[plain, faulty, faulty])), Some(2));
    }

    #[test]
    fn truncated_files_have_no_answer() {
        let whole = elf(&[0x08_0f_7d_ae]);
        for len in 0..whole.len() {
            assert_eq!(uniform_copies(&whole[..len]), None, "{len} bytes");
        }
    }
}
