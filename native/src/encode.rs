//! Text to token ids: one handle over two encoders.
//!
//! HuggingFace's encoder is the reference and is owned by Go through daulet/tokenizers; a handle borrows it. fastokens is
//! owned by its handle. Both are asked the same way: one text, any number of spans of it, each encoded by itself. A text
//! comes with its length (daulet's own entry takes a C string and would stop at a null byte), and ids are written straight
//! into the caller's buffer.

use std::{ffi::c_void, ptr, slice, str};

use libc::c_char;
use serde::Deserialize;
use tokenizers::{AddedToken, Tokenizer as HuggingFace};

use crate::{
    daulet::source::UnifiedTokenizer,
    ffi::{bytes, guard, set_error},
};

/// Outcome of [`prefixgate_encode`]. The numbers are part of include/prefixgate.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Status {
    Ok = 0,
    /// The text is not UTF-8, or a span does not lie on its characters' borders.
    BadText = 1,
    /// The encoder refused the text.
    Failed = 2,
    /// The encoder panicked. It may be used again.
    Panicked = 3,
}

/// One encoder, shared by any number of threads.
pub enum Encoder {
    /// Borrowed from Go, which keeps it alive as long as this handle.
    HuggingFace(*const HuggingFace),
    Fast(Box<fastokens::Tokenizer>),
    /// For tests of the border: every call panics.
    Panics,
}

/// A token that tokenizer_config.json declares and tokenizer.json lacks. transformers adds it on loading.
#[derive(Deserialize)]
struct ExtraToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl Encoder {
    fn encode(&self, text: &str, add_special: bool, out: &mut Vec<u32>) -> Result<(), Status> {
        match self {
            Encoder::HuggingFace(tokenizer) => {
                // SAFETY: Go keeps the tokenizer alive until it has freed this handle.
                let tokenizer = unsafe { &**tokenizer };
                // encode_fast leaves out the offsets, which nobody here reads. The ids are the same.
                let encoding = tokenizer.encode_fast(text, add_special).map_err(|_| Status::Failed)?;
                out.extend_from_slice(encoding.get_ids());
            }
            Encoder::Fast(tokenizer) => {
                let ids = tokenizer.encode_with_special_tokens(text, add_special).map_err(|_| Status::Failed)?;
                out.extend_from_slice(&ids);
            }
            Encoder::Panics => panic!("asked to"),
        }
        Ok(())
    }
}

/// Wraps daulet's tokenizer `handle`, which no one else may use meanwhile. Truncation and padding that tokenizer.json asks
/// for are switched off, as the engine does; `extra`, a JSON list of [`ExtraToken`], is added.
fn hf(handle: *mut c_void, extra: &[u8]) -> Result<Encoder, String> {
    // SAFETY: Go hands over the pointer that tokenizers_from_bytes gave it.
    let unified = unsafe { handle.cast::<UnifiedTokenizer>().as_mut() }.ok_or("no tokenizer")?;
    let UnifiedTokenizer::HuggingFace(tokenizer) = unified else {
        return Err("not a HuggingFace tokenizer".to_string());
    };
    tokenizer.with_truncation(None).map_err(|err| err.to_string())?;
    tokenizer.with_padding(None);
    for token in extra_tokens(extra)? {
        let added = AddedToken {
            content: token.content,
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            special: token.special,
        };
        if token.special {
            tokenizer.add_special_tokens(slice::from_ref(&added));
        } else {
            tokenizer.add_tokens(slice::from_ref(&added));
        }
        let id = tokenizer.token_to_id(&added.content);
        if id != Some(token.id) {
            return Err(format!("added token {} gets id {id:?}, its configuration says {}", added.content, token.id));
        }
    }
    Ok(Encoder::HuggingFace(tokenizer))
}

/// Builds fastokens' encoder from the text of a tokenizer.json.
fn fast(json: &[u8], extra: &[u8]) -> Result<Encoder, String> {
    let value = serde_json::from_slice(json).map_err(|err| err.to_string())?;
    let mut tokenizer = fastokens::Tokenizer::from_json(value).map_err(|err| err.to_string())?;
    tokenizer.set_truncation(None);
    tokenizer.set_padding(None);
    let extra = extra_tokens(extra)?;
    let new: Vec<_> = extra
        .iter()
        .map(|token| fastokens::NewToken {
            content: token.content.clone(),
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            special: token.special,
        })
        .collect();
    if !new.is_empty() {
        tokenizer.add_tokens(&new).map_err(|err| err.to_string())?;
        for token in &extra {
            if tokenizer.token_to_id(&token.content) != Some(token.id) {
                return Err(format!("added token {} does not get id {}", token.content, token.id));
            }
        }
    }
    Ok(Encoder::Fast(Box::new(tokenizer)))
}

fn extra_tokens(json: &[u8]) -> Result<Vec<ExtraToken>, String> {
    if json.is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_slice(json).map_err(|err| err.to_string())
}

fn handle(made: Result<Result<Encoder, String>, String>, error: *mut *mut c_char) -> *mut Encoder {
    let text = match made {
        Ok(Ok(encoder)) => return Box::into_raw(Box::new(encoder)),
        Ok(Err(text)) => text,
        Err(panic) => format!("the encoder panicked while loading: {panic}"),
    };
    // SAFETY: error is the caller's, by the contract of each constructor.
    unsafe { set_error(error, &text) };
    ptr::null_mut()
}

/// See include/prefixgate.h.
///
/// # Safety
/// `tokenizer` is a live pointer from tokenizers_from_bytes; `extra` points to `extra_len` bytes.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_encoder_hf(
    tokenizer: *mut c_void,
    extra: *const u8,
    extra_len: usize,
    error: *mut *mut c_char,
) -> *mut Encoder {
    let extra = bytes(extra, extra_len);
    handle(guard(|| hf(tokenizer, extra)), error)
}

/// See include/prefixgate.h.
///
/// # Safety
/// The pointers point to as many bytes as said.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_encoder_fast(
    json: *const u8,
    json_len: usize,
    extra: *const u8,
    extra_len: usize,
    error: *mut *mut c_char,
) -> *mut Encoder {
    let (json, extra) = (bytes(json, json_len), bytes(extra, extra_len));
    handle(guard(|| fast(json, extra)), error)
}

/// See include/prefixgate.h.
#[no_mangle]
pub extern "C" fn prefixgate_encoder_panics() -> *mut Encoder {
    Box::into_raw(Box::new(Encoder::Panics))
}

/// See include/prefixgate.h.
///
/// # Safety
/// `encoder` came from one of the constructors and is used by no call any more.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_encoder_free(encoder: *mut Encoder) {
    if !encoder.is_null() {
        let _ = guard(|| drop(Box::from_raw(encoder)));
    }
}

/// A stretch of the text, in bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Span {
    start: usize,
    end: usize,
}

/// See include/prefixgate.h.
///
/// # Safety
/// `encoder` is live; `text`, `spans`, `counts` and `dst` point to as many elements as said.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_encode(
    encoder: *const Encoder,
    text: *const u8,
    text_len: usize,
    spans: *const Span,
    spans_len: usize,
    add_special: bool,
    counts: *mut usize,
    dst: *mut u32,
    dst_cap: usize,
    len: *mut usize,
    spill: *mut *mut Vec<u32>,
) -> i32 {
    *len = 0;
    *spill = ptr::null_mut();
    let outcome = guard(|| {
        let text = str::from_utf8(bytes(text, text_len)).map_err(|_| Status::BadText)?;
        let spans = if spans_len == 0 { &[] } else { slice::from_raw_parts(spans, spans_len) };
        let mut out = Vec::with_capacity(text_len / 3 + 16);
        for (i, span) in spans.iter().enumerate() {
            let part = text.get(span.start..span.end).ok_or(Status::BadText)?;
            let before = out.len();
            (*encoder).encode(part, add_special, &mut out)?;
            *counts.add(i) = out.len() - before;
        }
        Ok::<_, Status>(out)
    });
    let out = match outcome {
        Ok(Ok(out)) => out,
        Ok(Err(status)) => return status as i32,
        Err(_) => return Status::Panicked as i32,
    };
    *len = out.len();
    if out.len() <= dst_cap {
        if !out.is_empty() {
            ptr::copy_nonoverlapping(out.as_ptr(), dst, out.len());
        }
    } else {
        *spill = Box::into_raw(Box::new(out));
    }
    Status::Ok as i32
}

/// See include/prefixgate.h.
///
/// # Safety
/// `spill` came from prefixgate_encode; `dst` has room for the ids it counted. A null `dst` only frees.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_take(spill: *mut Vec<u32>, dst: *mut u32) {
    if spill.is_null() {
        return;
    }
    let ids = Box::from_raw(spill);
    if !dst.is_null() {
        ptr::copy_nonoverlapping(ids.as_ptr(), dst, ids.len());
    }
}

/// See include/prefixgate.h.
#[no_mangle]
pub extern "C" fn prefixgate_trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
