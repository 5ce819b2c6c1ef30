//! What Go calls. See include/prefixgate_render.h.

use std::ptr;

use libc::c_char;

use super::{
    clock::Moment,
    prepare::{ContentFormat, Request},
    stack, Config, Failure, Rendered, Status, Templates,
};
use crate::ffi::{bytes, guard, set_error};

/// What a render tells beside its text.
#[repr(C)]
pub struct Outcome {
    len: usize,
    status: i32,
    /// 0: texts, 1: parts.
    content_format: i32,
    media: u32,
    uses_clock: u32,
}

/// A medium, for Go.
#[repr(C)]
pub struct Place {
    message: u32,
    part: u32,
    kind: u32,
    placed: u32,
    start: usize,
    end: usize,
}

/// See include/prefixgate_render.h.
///
/// # Safety
/// `config` points to `len` bytes; `error` is null or points to a pointer.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_template_new(config: *const u8, len: usize, error: *mut *mut c_char) -> *mut Templates {
    let config = bytes(config, len);
    // Compiling recurses as deeply as the template's source nests, which its length bounds.
    let made = stack::run(super::compile::MAX_SOURCE as u64 * 16, || {
        let config: Config = serde_json::from_slice(config).map_err(|err| format!("configuration of the renderer: {err}"))?;
        Templates::new(&config)
    });
    match made {
        Ok(Ok(templates)) => Box::into_raw(Box::new(templates)),
        Ok(Err(text)) => {
            set_error(error, &text);
            ptr::null_mut()
        }
        Err(_) => {
            set_error(error, "the chat template makes the parser panic");
            ptr::null_mut()
        }
    }
}

/// See include/prefixgate_render.h.
///
/// # Safety
/// `templates` came from prefixgate_template_new and is used by no call any more.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_template_free(templates: *mut Templates) {
    if !templates.is_null() {
        let _ = guard(|| drop(Box::from_raw(templates)));
    }
}

/// See include/prefixgate_render.h.
///
/// # Safety
/// `templates` is live.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_template_format(templates: *const Templates) -> i32 {
    guard(|| format_number((*templates).format())).unwrap_or(0)
}

fn format_number(format: ContentFormat) -> i32 {
    i32::from(format == ContentFormat::Parts)
}

/// See include/prefixgate_render.h.
///
/// # Safety
/// `templates` is live; every other pointer points to as many elements as said.
#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn prefixgate_template_render(
    templates: *const Templates,
    context: bool,
    messages: *const u8,
    messages_len: usize,
    tools: *const u8,
    tools_len: usize,
    documents: *const u8,
    documents_len: usize,
    kwargs: *const u8,
    kwargs_len: usize,
    effort: *const u8,
    effort_len: usize,
    flags: u32,
    unix: i64,
    micro: u32,
    offset: i32,
    dst: *mut u8,
    dst_cap: usize,
    outcome: *mut Outcome,
    spill: *mut *mut Rendered,
    error: *mut *mut c_char,
) {
    *spill = ptr::null_mut();
    *outcome = Outcome { len: 0, status: Status::Panicked as i32, content_format: 0, media: 0, uses_clock: 0 };
    let flag = |shift: u32| (flags >> shift & 1 != 0).then_some(flags >> (shift + 1) & 1 != 0);
    let request = Request {
        messages: bytes(messages, messages_len),
        tools: bytes(tools, tools_len),
        documents: bytes(documents, documents_len),
        kwargs: bytes(kwargs, kwargs_len),
        reasoning_effort: bytes(effort, effort_len),
        add_generation_prompt: flag(0),
        continue_final_message: flag(2),
    };
    let input = messages_len + tools_len + documents_len + kwargs_len + effort_len;
    let templates = &*templates;
    let fuel = templates.fuel(input);
    let result = stack::run(fuel, || {
        super::clock::set(Moment::new(unix, micro, offset.into()));
        if context {
            templates.render_context(request.messages, request.continue_final_message == Some(true), fuel)
        } else {
            templates.render(&request, fuel)
        }
    });
    let rendered = match result {
        Ok(Ok(rendered)) => rendered,
        Ok(Err(Failure { status, text })) => {
            (*outcome).status = status as i32;
            set_error(error, &text);
            return;
        }
        Err(_) => {
            // The panic's text may quote the conversation.
            set_error(error, "the template renderer panicked");
            return;
        }
    };
    *outcome = Outcome {
        len: rendered.text.len(),
        status: Status::Ok as i32,
        content_format: format_number(rendered.format),
        media: u32::try_from(rendered.media.len()).unwrap_or(u32::MAX),
        uses_clock: rendered.uses_clock.into(),
    };
    if rendered.media.is_empty() && rendered.text.len() <= dst_cap {
        ptr::copy_nonoverlapping(rendered.text.as_ptr(), dst, rendered.text.len());
    } else {
        *spill = Box::into_raw(Box::new(rendered));
    }
}

/// See include/prefixgate_render.h.
///
/// # Safety
/// `spill` came from prefixgate_template_render; `dst` and `places` have room for what it counted. A null `dst` only frees.
#[no_mangle]
pub unsafe extern "C" fn prefixgate_template_take(spill: *mut Rendered, dst: *mut u8, places: *mut Place) {
    if spill.is_null() {
        return;
    }
    let rendered = Box::from_raw(spill);
    if dst.is_null() {
        return;
    }
    ptr::copy_nonoverlapping(rendered.text.as_ptr(), dst, rendered.text.len());
    for (i, placed) in rendered.media.iter().enumerate() {
        let (start, end) = placed.range.unwrap_or((0, 0));
        *places.add(i) = Place {
            message: u32::try_from(placed.medium.message).unwrap_or(u32::MAX),
            part: u32::try_from(placed.medium.part).unwrap_or(u32::MAX),
            kind: placed.medium.kind as u32,
            placed: placed.range.is_some().into(),
            start,
            end,
        };
    }
}
