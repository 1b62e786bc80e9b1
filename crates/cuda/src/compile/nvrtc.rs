//! Compilation of one program with NVRTC.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

use cudarc::nvrtc::sys;

use super::error::CompileError;

/// A program handle. Destroyed on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `cubin`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

/// Compiles `source` with `options`. Returns the CUBIN and the log.
///
/// [`Nvrtc::open`](super::nvrtc_library::Nvrtc::open) must have succeeded. Messages use `name` and
/// `arch`.
///
/// # Errors
/// [`CompileError::Rejected`] with the log, [`CompileError::Nvrtc`] if the library fails.
pub(super) fn cubin(
    source: &str,
    name: &str,
    arch: &str,
    options: &[String],
) -> Result<(Vec<u8>, String), CompileError> {
    let failed = |call: &'static str, detail: String| CompileError::Nvrtc {
        call,
        unit: name.to_owned(),
        detail,
    };
    let text = |text: &str| CString::new(text).map_err(|e| failed("CString::new", e.to_string()));
    let c_source = text(source)?;
    let c_name = text(name.split(' ').next().unwrap_or(name))?;
    let mut handle = null_mut();
    // SAFETY: both strings end in NUL and live through the call. There are no headers.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut handle,
            c_source.as_ptr(),
            c_name.as_ptr(),
            0,
            null(),
            null(),
        )
    };
    let check = |call, result| match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(failed(call, error_string(other))),
    };
    check("nvrtcCreateProgram", created)?;
    let program = Program(handle);
    let c_options = options
        .iter()
        .map(|option| text(option))
        .collect::<Result<Vec<CString>, _>>()?;
    let pointers: Vec<*const c_char> = c_options.iter().map(|option| option.as_ptr()).collect();
    let count = i32::try_from(pointers.len()).unwrap_or(i32::MAX);
    // SAFETY: `pointers` has `count` strings, alive through the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, count, pointers.as_ptr()) };
    let log = log(&program);
    if compiled == sys::nvrtcResult::NVRTC_ERROR_COMPILATION {
        return Err(CompileError::Rejected {
            unit: name.to_owned(),
            arch: arch.to_owned(),
            log,
        });
    }
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        let detail = format!("{}; {log}", error_string(compiled));
        return Err(failed("nvrtcCompileProgram", detail));
    }
    let mut size = 0_usize;
    // SAFETY: writes one size.
    check("nvrtcGetCUBINSize", unsafe {
        sys::nvrtcGetCUBINSize(program.0, &raw mut size)
    })?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer has the size that the library returned.
    check("nvrtcGetCUBIN", unsafe {
        sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast::<c_char>())
    })?;
    Ok((cubin, log))
}

/// The compiler log, or an empty string.
fn log(program: &Program) -> String {
    let mut size = 0_usize;
    // SAFETY: writes one size.
    if unsafe { sys::nvrtcGetProgramLogSize(program.0, &raw mut size) }
        != sys::nvrtcResult::NVRTC_SUCCESS
    {
        return String::new();
    }
    let mut bytes = vec![0_u8; size];
    // SAFETY: the buffer has the size that the library returned.
    let got = unsafe { sys::nvrtcGetProgramLog(program.0, bytes.as_mut_ptr().cast::<c_char>()) };
    if got != sys::nvrtcResult::NVRTC_SUCCESS {
        return String::new();
    }
    String::from_utf8_lossy(&bytes)
        .trim_end_matches('\0')
        .to_owned()
}

fn error_string(result: sys::nvrtcResult) -> String {
    // SAFETY: the library returns a static string for any code.
    unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) }
        .to_string_lossy()
        .into_owned()
}
