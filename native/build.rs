fn main() {
    println!("cargo:rerun-if-env-changed=PREFIXGATE_TOKENIZERS_SRC");
    let src = std::env::var("PREFIXGATE_TOKENIZERS_SRC").expect("PREFIXGATE_TOKENIZERS_SRC: run scripts/native.sh");
    let text = std::fs::read_to_string(format!("{src}/src/lib.rs")).unwrap();
    let out = std::env::var("OUT_DIR").unwrap();
    std::fs::write(format!("{out}/daulet.rs"), text).unwrap();
}
