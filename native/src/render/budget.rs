//! What one render may cost beyond minijinja's fuel: its output, and the time on the clock.
//!
//! A render runs on one thread from beginning to end, so its budget lives in thread-local cells that whatever works in steps
//! asks: reading the request, its preparation, the formatter, the filters and each turn of a loop.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use minijinja::{Error, ErrorKind};

use super::Fault;

/// The clock is read at every so many steps: a step takes well under a microsecond unless it moves much data, and those
/// that do call [`check`].
const STEPS: u32 = 256;

thread_local! {
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
    static LEFT: Cell<u32> = const { Cell::new(STEPS) };
    static EMITTED: Cell<usize> = const { Cell::new(0) };
    static MAX_BYTES: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A budget that counts on this thread until it is dropped, so that what runs later is not bounded by it.
pub struct Budget(());

/// Starts a request's budget: the time for all of it, and the output of each template that it runs.
pub fn start(max_bytes: usize, time: Duration) -> Budget {
    DEADLINE.set(Instant::now().checked_add(time));
    LEFT.set(STEPS);
    MAX_BYTES.set(max_bytes);
    Budget(())
}

impl Drop for Budget {
    fn drop(&mut self) {
        DEADLINE.set(None);
        MAX_BYTES.set(usize::MAX);
    }
}

/// Begins to count the output anew.
pub fn output() {
    EMITTED.set(0);
}

pub fn too_big() -> Error {
    Error::new(ErrorKind::InvalidOperation, "output too large").with_source(Fault::TooBig)
}

/// One step.
pub fn tick() -> Result<(), Error> {
    let left = LEFT.get();
    if left > 0 {
        LEFT.set(left - 1);
        return Ok(());
    }
    LEFT.set(STEPS);
    clock()
}

fn clock() -> Result<(), Error> {
    match DEADLINE.get() {
        Some(deadline) if Instant::now() >= deadline => {
            Err(Error::new(ErrorKind::OutOfFuel, "out of time").with_source(Fault::OutOfTime))
        }
        _ => Ok(()),
    }
}

/// A step that wrote `bytes` of output, be it to the prompt or to a variable.
pub fn emit(bytes: usize) -> Result<(), Error> {
    let emitted = EMITTED.get().saturating_add(bytes);
    EMITTED.set(emitted);
    // Captured text is counted again when it is printed, hence the factor.
    if emitted > MAX_BYTES.get().saturating_mul(4) {
        return Err(too_big());
    }
    tick()
}

/// A step that builds a string of `bytes` so far, or is about to.
pub fn check(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_BYTES.get().saturating_mul(4) {
        return Err(too_big());
    }
    tick()
}
