//! Prepares the source of the Go module daulet/tokenizers for inclusion in this crate.
//!
//! The module exports its C API itself, as `extern "C"` functions: a panic in one of them ends the process. Here each
//! becomes an ordinary Rust function, and src/daulet.rs exports the same names with every panic caught.

use std::{collections::BTreeSet, env, fs, path::Path};

const EXPORT: &str = "#[no_mangle]\npub extern \"C\" fn ";
const WRAPPER: &str = "src/daulet.rs";

fn main() {
    println!("cargo:rerun-if-env-changed=PREFIXGATE_TOKENIZERS_SRC");
    println!("cargo:rerun-if-changed={WRAPPER}");
    println!("cargo:rerun-if-changed=build.rs");
    let dir = env::var("PREFIXGATE_TOKENIZERS_SRC")
        .expect("PREFIXGATE_TOKENIZERS_SRC, the folder of the Go module daulet/tokenizers, is not set: build with scripts/native.sh");
    let path = Path::new(&dir).join("src/lib.rs");
    println!("cargo:rerun-if-changed={}", path.display());
    let source = fs::read_to_string(&path).unwrap_or_else(|err| panic!("read {}: {err}", path.display()));
    let wrapper = fs::read_to_string(WRAPPER).unwrap_or_else(|err| panic!("read {WRAPPER}: {err}"));

    let mut parts = source.split(EXPORT);
    let mut out = parts.next().unwrap_or_default().to_string();
    let mut names = BTreeSet::new();
    for part in parts {
        let name = part.split('(').next().unwrap_or_default().trim();
        if name.starts_with("tokenizers_version") {
            // Go's link-time check of the version. It does nothing, so it cannot panic.
            out.push_str(EXPORT);
        } else {
            names.insert(name.to_string());
            out.push_str("pub fn ");
        }
        out.push_str(part);
    }
    assert!(!out.contains("#[no_mangle]\npub unsafe"), "{}: exports in a new form", path.display());
    for name in &names {
        assert!(
            wrapper.contains(&format!("fn {name}(")),
            "{} exports {name}, which {WRAPPER} does not wrap: add it there",
            path.display()
        );
    }
    assert!(!names.is_empty(), "{}: no exported function found", path.display());
    let target = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("daulet.rs");
    fs::write(&target, out).unwrap_or_else(|err| panic!("write {}: {err}", target.display()));
}
