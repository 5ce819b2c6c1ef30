//! Renders run on stacks of their own.
//!
//! cgo calls come on whatever thread Go has, whose stack may be small, and a template can build values nested as deeply as
//! its fuel lasts: printing, comparing and freeing them takes a stack frame a level. Stacks here are address space first;
//! memory comes with use, and a pool keeps a few of them.

use std::{
    panic::{catch_unwind, AssertUnwindSafe},
    ptr,
    sync::Mutex,
};

use crate::ffi::guard;

/// Bytes of stack for each unit of fuel. Nesting a value one level deeper costs more than `NESTING_FUEL` units, and freeing
/// such a value, the only recursion over values without a bound of its own, takes a few hundred bytes a level.
const BYTES_PER_FUEL: usize = 128;
const MIN_BYTES: usize = 64 << 20;
const MAX_BYTES: usize = 64 << 30;
const POOLED: usize = 16;
/// At the low end, never to be touched: an overflow ends the process instead of writing over a neighbor.
const GUARD_BYTES: usize = 1 << 20;

struct Stack {
    base: *mut u8,
    size: usize,
}

// SAFETY: a stack is plain memory, used by one thread at a time.
unsafe impl Send for Stack {}

impl Stack {
    fn new(size: usize) -> Option<Stack> {
        // SAFETY: an anonymous mapping touches no memory of anyone's.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let stack = Stack { base: base.cast(), size };
        // SAFETY: the range is the mapping's own beginning.
        if unsafe { libc::mprotect(base, GUARD_BYTES, libc::PROT_NONE) } != 0 {
            return None;
        }
        Some(stack)
    }

    /// Gives memory back that a deep render used. A shallow one leaves its pages for the next.
    fn trim(&self) {
        const KEEP: usize = 1 << 20;
        // SAFETY: the range lies inside the mapping, and nothing runs on it.
        unsafe {
            libc::madvise(
                self.base.add(GUARD_BYTES).cast(),
                self.size - GUARD_BYTES - KEEP,
                libc::MADV_DONTNEED,
            );
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing runs on it.
        unsafe {
            libc::munmap(self.base.cast(), self.size);
        }
    }
}

static POOL: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

/// Runs `f` on a stack that suffices for `fuel`. A panic inside comes back as an error; so does a lack of memory.
pub fn run<R>(fuel: u64, f: impl FnOnce() -> R) -> Result<R, String> {
    let wanted = usize::try_from(fuel).unwrap_or(usize::MAX).saturating_mul(BYTES_PER_FUEL).clamp(MIN_BYTES, MAX_BYTES);
    let wanted = wanted.next_power_of_two();
    let pooled = POOL.lock().ok().and_then(|mut pool| {
        let at = pool.iter().rposition(|stack| stack.size == wanted)?;
        Some(pool.swap_remove(at))
    });
    let Some(stack) = pooled.or_else(|| Stack::new(wanted)) else {
        return Err("no memory for a stack".to_string());
    };
    // SAFETY: the memory is ours, aligned to pages, and f's panics end inside.
    let out = unsafe {
        psm::on_stack(
            stack.base.add(GUARD_BYTES),
            stack.size - GUARD_BYTES,
            AssertUnwindSafe(|| catch_unwind(AssertUnwindSafe(f))),
        )
    };
    if let Ok(mut pool) = POOL.lock() {
        if pool.len() < POOLED {
            stack.trim();
            pool.push(stack);
        }
    }
    // The panic is thrown once more, on the caller's stack, for the one place that makes texts of them.
    guard(|| match out {
        Ok(value) => value,
        Err(cause) => std::panic::resume_unwind(cause),
    })
}
