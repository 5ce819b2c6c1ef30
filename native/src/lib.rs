#[allow(warnings)]
mod daulet {
    include!(concat!(env!("OUT_DIR"), "/daulet.rs"));
}
pub use minijinja;
pub use fastokens;
