//! All of prefixgate's native code, in one static library (two Rust static libraries collide at link time):
//!
//! - [`daulet`]: the C API of the Go module daulet/tokenizers (HuggingFace's encoder), compiled from the module's own source;
//! - [`encode`]: the two encoders, HuggingFace's and fastokens, behind functions that take lengths;
//! - [`render`]: chat templates.
//!
//! include/prefixgate.h declares what is exported. No panic crosses into Go: every exported function runs its body through
//! [`ffi::guard`], which turns a panic into an error.

mod daulet;
mod encode;
pub mod ffi;
mod render;
