//! The C API of the Go module daulet/tokenizers, with panics caught.
//!
//! build.rs turns the module's own exports into ordinary functions in `source`; the functions below carry the exported
//! names. A panic becomes what the Go side reads as a failure: a null pointer, an empty buffer, zero.

use std::ptr;

use libc::{c_char, c_void};

use crate::ffi::{guard, set_error};

/// The module's source as it stands, less its exports.
#[allow(warnings, clippy::all)]
pub mod source {
    include!(concat!(env!("OUT_DIR"), "/daulet.rs"));
}

use source::{tokenizers_buffer, tokenizers_encode_options, tokenizers_options};

const PANICKED: &str = "the tokenizer library panicked";

/// What Go reads as "nothing encoded".
fn empty() -> tokenizers_buffer {
    // SAFETY: the struct holds raw pointers and a length only; null and 0 are valid for them.
    unsafe { std::mem::zeroed() }
}

/// Runs a constructor; a panic gives null and an error text.
fn constructor(error: *mut *mut c_char, f: impl FnOnce() -> *mut c_void) -> *mut c_void {
    guard(f).unwrap_or_else(|_| {
        // SAFETY: error is the caller's, by the contract of each constructor.
        unsafe { set_error(error, PANICKED) };
        ptr::null_mut()
    })
}

#[no_mangle]
pub extern "C" fn tokenizers_from_bytes(bytes: *const u8, len: u32, opts: &tokenizers_options, error: *mut *mut c_char) -> *mut c_void {
    constructor(error, || source::tokenizers_from_bytes(bytes, len, opts, error))
}

#[no_mangle]
pub extern "C" fn tokenizers_from_bytes_with_truncation(
    bytes: *const u8,
    len: u32,
    max_len: usize,
    dir: u8,
    error: *mut *mut c_char,
) -> *mut c_void {
    constructor(error, || source::tokenizers_from_bytes_with_truncation(bytes, len, max_len, dir, error))
}

#[no_mangle]
pub extern "C" fn tokenizers_from_file(config: *const c_char, error: *mut *mut c_char) -> *mut c_void {
    constructor(error, || source::tokenizers_from_file(config, error))
}

#[no_mangle]
pub extern "C" fn tokenizers_from_tiktoken(
    model_file: *const c_char,
    config_file: *const c_char,
    pattern: *const c_char,
    error: *mut *mut c_char,
) -> *mut c_void {
    constructor(error, || source::tokenizers_from_tiktoken(model_file, config_file, pattern, error))
}

#[no_mangle]
pub extern "C" fn tokenizers_encode(
    ptr: *mut c_void,
    message: *const c_char,
    options: &tokenizers_encode_options,
) -> tokenizers_buffer {
    guard(|| source::tokenizers_encode(ptr, message, options)).unwrap_or_else(|_| empty())
}

#[no_mangle]
pub extern "C" fn tokenizers_decode(ptr: *mut c_void, ids: *const u32, len: u32, skip_special_tokens: bool) -> *mut c_char {
    guard(|| source::tokenizers_decode(ptr, ids, len, skip_special_tokens)).unwrap_or(ptr::null_mut())
}

#[no_mangle]
pub extern "C" fn tokenizers_vocab_size(ptr: *mut c_void) -> u32 {
    guard(|| source::tokenizers_vocab_size(ptr)).unwrap_or(0)
}

#[no_mangle]
pub extern "C" fn tokenizers_free_tokenizer(ptr: *mut c_void) {
    let _ = guard(|| source::tokenizers_free_tokenizer(ptr));
}

#[no_mangle]
pub extern "C" fn tokenizers_free_buffer(buf: tokenizers_buffer) {
    let _ = guard(|| source::tokenizers_free_buffer(buf));
}

#[no_mangle]
pub extern "C" fn tokenizers_free_string(ptr: *mut c_char) {
    let _ = guard(|| source::tokenizers_free_string(ptr));
}
