//! What every exported function needs: panics caught, texts and ids handed over with their lengths.

use std::{
    ffi::CString,
    panic::{catch_unwind, set_hook, AssertUnwindSafe},
    sync::Once,
};

use libc::c_char;

/// Runs `f` and turns a panic into `Err` with the panic's message. The message may quote input: it is for tests and
/// start-up errors about files, never for a request's error.
pub fn guard<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    // The default hook prints the panic's message, which may quote a prompt, to stderr.
    static QUIET: Once = Once::new();
    QUIET.call_once(|| set_hook(Box::new(|_| {})));
    catch_unwind(AssertUnwindSafe(f)).map_err(|cause| {
        let text = cause
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| cause.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        // Dropping the payload may panic in turn; leaking a few bytes is better than ending the process.
        std::mem::forget(cause);
        text
    })
}

/// Stores `text` as a C string in `*error`, to be freed with `tokenizers_free_string`. Null bytes are dropped.
///
/// # Safety
/// `error` must be null or point to where a pointer may be written.
pub unsafe fn set_error(error: *mut *mut c_char, text: &str) {
    if error.is_null() {
        return;
    }
    let clean: Vec<u8> = text.bytes().filter(|&b| b != 0).collect();
    // CString::new cannot fail without null bytes.
    let owned = CString::new(clean).unwrap_or_default();
    *error = owned.into_raw();
}

/// The bytes that Go handed over. A null pointer counts as empty.
///
/// # Safety
/// `data` must point to `len` bytes that live and do not change as long as the result is used.
pub unsafe fn bytes<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if data.is_null() || len == 0 {
        return &[];
    }
    std::slice::from_raw_parts(data, len)
}
