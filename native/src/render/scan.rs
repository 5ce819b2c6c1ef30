//! What Jinja's lexer does and minijinja's does not, done to the source before it is parsed.
//!
//! - Line ends become \n, and one at the end of the template goes.
//! - String literals take Python's escapes; adjacent ones are one.
//! - transformers' `{% generation %}` blocks, which mark what a model said for training, become plain scopes.

/// Rewrites a template's source.
pub fn normalize(source: &str) -> String {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source.as_str();
    while let Some(at) = next_tag(rest) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("{#") {
            // A comment holds nothing to change. Without an end, the parser says so.
            let end = rest[2..].find("#}").map_or(rest.len(), |i| i + 4);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        if let Some((start, len)) = raw_block(rest) {
            if len == 0 {
                break; // it does not end: the parser says so
            }
            out.push_str(&rest[..start]);
            if rest[start..].starts_with('\n') && !rest[..start].ends_with("-%}") {
                // minijinja takes the line end behind the tag, Jinja does not here.
                out.push('\n');
            }
            out.push_str(&rest[start..len]);
            rest = &rest[len..];
            continue;
        }
        if let Some((tag, len)) = generation(rest) {
            out.push_str(&tag);
            rest = &rest[len..];
            continue;
        }
        let close = if rest.starts_with("{{") { "}}" } else { "%}" };
        out.push_str(&rest[..2]);
        rest = &rest[2..];
        let len = inside(rest, close, &mut out);
        rest = &rest[len..];
    }
    out.push_str(rest);
    out
}

fn next_tag(s: &str) -> Option<usize> {
    let bytes = s.as_bytes();
    (0..bytes.len().saturating_sub(1)).find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

/// The words of a tag at the start of `s` and its length, if it holds nothing but one word.
fn word_tag(s: &str) -> Option<(&str, &str, &str, usize)> {
    let inner = s.strip_prefix("{%")?;
    let open = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
    let body = inner[open.len()..].trim_start();
    let word_len = body.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(body.len());
    let word = &body[..word_len];
    let after = body[word_len..].trim_start();
    let close = if after.starts_with(['-', '+']) { &after[..1] } else { "" };
    let after = after[close.len()..].strip_prefix("%}")?;
    Some((open, word, close, s.len() - after.len()))
}

/// Where the text of a raw block at the start of `s` starts, and the length of the block; that is 0 if it does not end.
fn raw_block(s: &str) -> Option<(usize, usize)> {
    let (_, word, _, start) = word_tag(s)?;
    if word != "raw" {
        return None;
    }
    let mut at = start;
    loop {
        match s[at..].find("{%") {
            Some(i) => at += i,
            None => return Some((start, 0)),
        }
        match word_tag(&s[at..]) {
            Some((_, "endraw", _, len)) => return Some((start, at + len)),
            _ => at += 2,
        }
    }
}

fn generation(s: &str) -> Option<(String, usize)> {
    let (open, word, close, len) = word_tag(s)?;
    let word = match word {
        "generation" => "with",
        "endgeneration" => "endwith",
        _ => return None,
    };
    Some((format!("{{%{open} {word} {close}%}}"), len))
}

/// Copies the inside of a tag with its end, string literals rewritten. Returns how much of `s` that was.
fn inside(s: &str, close: &str, out: &mut String) -> usize {
    let mut depth = 0usize;
    let mut at = 0;
    let mut pending: Option<String> = None;
    while at < s.len() {
        let rest = &s[at..];
        let c = rest.chars().next().unwrap_or_default();
        if c == '\'' || c == '"' {
            let Some((text, len)) = string(rest, c) else { break };
            match &mut pending {
                Some(before) => before.push_str(&text),
                None => pending = Some(text),
            }
            at += len;
            continue;
        }
        if let Some(text) = &pending {
            // White space between two strings joins them, so it waits for what comes next.
            let blank = rest.len() - rest.trim_start().len();
            if blank > 0 && rest[blank..].starts_with(['\'', '"']) {
                at += blank;
                continue;
            }
            literal(out, text);
            pending = None;
        }
        if depth == 0 && rest.starts_with(close) {
            out.push_str(close);
            return at + close.len();
        }
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        out.push(c);
        at += c.len_utf8();
    }
    if let Some(text) = &pending {
        literal(out, text);
    }
    out.push_str(&s[at..]);
    s.len()
}

fn literal(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        if c == '"' || c == '\\' {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
}

/// The text and the length of the string literal at the start of `s`; none if it does not end.
fn string(s: &str, quote: char) -> Option<(String, usize)> {
    let mut out = String::new();
    let mut chars = s.char_indices().peekable();
    chars.next();
    while let Some((i, c)) = chars.next() {
        if c == quote {
            return Some((out, i + 1));
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        let (_, c) = chars.next()?;
        let mut hex = |digits: usize, out: &mut String| {
            let start = chars.peek().map_or(s.len(), |x| x.0);
            let code = s.get(start..start + digits).filter(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
            match code.and_then(|t| u32::from_str_radix(t, 16).ok()).and_then(char::from_u32) {
                Some(c) => {
                    out.push(c);
                    for _ in 0..digits {
                        chars.next();
                    }
                }
                // Python refuses the template; half of a surrogate pair it takes, but no tokenizer does.
                None => out.push('\u{fffd}'),
            }
        };
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(c),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\u{b}'),
            'x' => hex(2, &mut out),
            'u' => hex(4, &mut out),
            'U' => hex(8, &mut out),
            '0'..='7' => {
                let mut n = c as u32 - '0' as u32;
                for _ in 0..2 {
                    match chars.peek().and_then(|x| x.1.to_digit(8)) {
                        Some(d) => {
                            n = n * 8 + d;
                            chars.next();
                        }
                        None => break,
                    }
                }
                out.push(char::from_u32(n).unwrap_or('\u{fffd}'));
            }
            c => {
                out.push('\\');
                out.push(c);
            }
        }
    }
    None
}
