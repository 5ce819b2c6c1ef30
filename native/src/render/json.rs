//! JSON as Python's `json` module reads and writes it, from and to template values.
//!
//! The order of keys survives, a repeated key keeps its first place and its last value, and numbers print as Python would
//! print them after reading: integers of any size digit by digit, floats by their shortest text.

use std::{fmt, sync::Arc};

use minijinja::{
    value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind},
    Error, ErrorKind, Value,
};

use super::{budget, python};

/// Deeper input is refused. Python's own reader gives up at about its recursion limit of 1,000.
pub const MAX_DEPTH: usize = 512;

/// A dictionary read from JSON or made by request preparation. Keys are strings, in the order of the text.
#[derive(Default)]
pub struct Dict {
    items: Vec<(Arc<str>, Value)>,
}

impl fmt::Debug for Dict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.items.iter().map(|(k, v)| (k, v))).finish()
    }
}

/// Objects with more keys than this are checked for repeated keys by a set while they are read.
const LINEAR: usize = 32;

impl Dict {
    pub fn new() -> Dict {
        Dict::default()
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.items.iter().find(|(k, _)| &**k == key).map(|(_, v)| v)
    }

    /// The value under `key` unless it is absent or null.
    pub fn some(&self, key: &str) -> Option<&Value> {
        self.get(key).filter(|v| !v.is_none())
    }

    /// Sets `key`, keeping its place if it is there.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.items.iter_mut().find(|(k, _)| &**k == key) {
            Some(item) => item.1 = value,
            None => self.push(key, value),
        }
    }

    /// Appends `key`, which the caller knows to be new.
    pub fn push(&mut self, key: &str, value: Value) {
        self.items.push((key.into(), value));
    }

    pub fn remove(&mut self, key: &str) {
        self.items.retain(|(k, _)| &**k != key);
    }

    /// The same keys and values, to be changed.
    pub fn copy(&self) -> Dict {
        Dict { items: self.items.clone() }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.items.iter().map(|(k, v)| (&**k, v))
    }
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_str()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let this = self.clone();
        Enumerator::KeyValueIter(Box::new(
            (0..self.items.len()).map(move |i| (Value::from(this.items[i].0.clone()), this.items[i].1.clone())),
        ))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        !self.items.is_empty()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        render_python(&Value::from_dyn_object(self.clone()), f)
    }
}

/// An integer too large for 128 bits: its digits, with a minus sign where it has one.
#[derive(Debug)]
pub struct BigInt(pub Arc<str>);

impl Object for BigInt {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn render_python(value: &Value, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut out = String::new();
    python::write_str(&mut out, value).map_err(|_| fmt::Error)?;
    f.write_str(&out)
}

/// Why a text could not be read. It never quotes the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JsonError {
    Syntax,
    TooDeep,
    /// Half of a surrogate pair: Python reads it, but no tokenizer takes it.
    LoneSurrogate,
    NotUtf8,
    OutOfTime,
}

impl JsonError {
    pub fn text(self) -> &'static str {
        match self {
            JsonError::Syntax => "invalid JSON",
            JsonError::TooDeep => "JSON nested too deeply",
            JsonError::LoneSurrogate => "a string holds half of a surrogate pair",
            JsonError::NotUtf8 => "text is not UTF-8",
            JsonError::OutOfTime => "out of time while the request was read",
        }
    }
}

/// Reads one JSON text.
pub fn parse(text: &[u8]) -> Result<Value, JsonError> {
    let text = std::str::from_utf8(text).map_err(|_| JsonError::NotUtf8)?;
    let mut reader = Reader { text, pos: 0 };
    reader.space();
    let value = reader.value(0)?;
    reader.space();
    if reader.pos != text.len() {
        return Err(JsonError::Syntax);
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    pos: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.pos).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.pos += 1;
        }
    }

    fn expect(&mut self, word: &str, value: Value) -> Result<Value, JsonError> {
        if self.text[self.pos..].starts_with(word) {
            self.pos += word.len();
            Ok(value)
        } else {
            Err(JsonError::Syntax)
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, JsonError> {
        if depth > MAX_DEPTH {
            return Err(JsonError::TooDeep);
        }
        budget::tick().map_err(|_| JsonError::OutOfTime)?;
        match self.peek() {
            Some(b'"') => self.string_value(),
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b't') => self.expect("true", Value::from(true)),
            Some(b'f') => self.expect("false", Value::from(false)),
            Some(b'n') => self.expect("null", Value::from(())),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(JsonError::Syntax),
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.pos += 1;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.pos += 1;
            return Ok(Value::from(items));
        }
        loop {
            self.space();
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b',') => self.pos += 1,
                Some(b']') => {
                    self.pos += 1;
                    return Ok(Value::from(items));
                }
                _ => return Err(JsonError::Syntax),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.pos += 1;
        let mut dict = Dict::new();
        let mut seen: Option<std::collections::HashMap<Arc<str>, usize>> = None;
        self.space();
        if self.peek() == Some(b'}') {
            self.pos += 1;
            return Ok(Value::from_object(dict));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(JsonError::Syntax);
            }
            let key: Arc<str> = match self.string()? {
                Text::Plain(s) => s.into(),
                Text::Built(s) => s.into(),
            };
            self.space();
            if self.peek() != Some(b':') {
                return Err(JsonError::Syntax);
            }
            self.pos += 1;
            self.space();
            let value = self.value(depth + 1)?;
            if seen.is_none() && dict.items.len() > LINEAR {
                seen = Some(dict.items.iter().enumerate().map(|(i, (k, _))| (k.clone(), i)).collect());
            }
            let at = match &seen {
                Some(seen) => seen.get(&key).copied(),
                None => dict.items.iter().position(|(k, _)| *k == key),
            };
            match at {
                Some(at) => dict.items[at].1 = value,
                None => {
                    if let Some(seen) = &mut seen {
                        seen.insert(key.clone(), dict.items.len());
                    }
                    dict.items.push((key, value));
                }
            }
            self.space();
            match self.peek() {
                Some(b',') => self.pos += 1,
                Some(b'}') => {
                    self.pos += 1;
                    return Ok(Value::from_object(dict));
                }
                _ => return Err(JsonError::Syntax),
            }
        }
    }

    fn string_value(&mut self) -> Result<Value, JsonError> {
        Ok(match self.string()? {
            Text::Plain(s) => Value::from(s),
            Text::Built(s) => Value::from(s),
        })
    }

    fn string(&mut self) -> Result<Text<'a>, JsonError> {
        self.pos += 1;
        let start = self.pos;
        let bytes = self.text.as_bytes();
        let run = plain_run(&bytes[start..]);
        self.pos += run;
        match self.peek() {
            Some(b'"') => {
                self.pos += 1;
                return Ok(Text::Plain(&self.text[start..start + run]));
            }
            Some(b'\\') => {}
            _ => return Err(JsonError::Syntax),
        }
        // One pass over the rest, runs copied at once. The size is a guess that avoids most growth of long strings.
        let mut out = String::with_capacity((run + 64).max(run + run / 2));
        out.push_str(&self.text[start..start + run]);
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.pos += 1;
                    return Ok(Text::Built(out));
                }
                Some(b'\\') => {
                    self.pos += 1;
                    let c = self.peek().ok_or(JsonError::Syntax)?;
                    self.pos += 1;
                    out.push(match c {
                        b'"' => '"',
                        b'\\' => '\\',
                        b'/' => '/',
                        b'b' => '\u{8}',
                        b'f' => '\u{c}',
                        b'n' => '\n',
                        b'r' => '\r',
                        b't' => '\t',
                        b'u' => self.escape()?,
                        _ => return Err(JsonError::Syntax),
                    });
                }
                Some(_) => {
                    let run = plain_run(&bytes[self.pos..]);
                    if run == 0 {
                        return Err(JsonError::Syntax);
                    }
                    out.push_str(&self.text[self.pos..self.pos + run]);
                    self.pos += run;
                }
                None => return Err(JsonError::Syntax),
            }
        }
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.as_bytes().get(self.pos..self.pos + 4).ok_or(JsonError::Syntax)?;
        let mut n = 0;
        for &d in digits {
            n = n * 16 + (d as char).to_digit(16).ok_or(JsonError::Syntax)?;
        }
        self.pos += 4;
        Ok(n)
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let high = self.hex4()?;
        if !(0xD800..0xE000).contains(&high) {
            return char::from_u32(high).ok_or(JsonError::Syntax);
        }
        if high >= 0xDC00 || !self.text.as_bytes()[self.pos..].starts_with(b"\\u") {
            return Err(JsonError::LoneSurrogate);
        }
        self.pos += 2;
        let low = self.hex4()?;
        if !(0xDC00..0xE000).contains(&low) {
            return Err(JsonError::LoneSurrogate);
        }
        char::from_u32(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)).ok_or(JsonError::Syntax)
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.pos;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.pos += 1;
        }
        if self.pos == start {
            return Err(JsonError::Syntax);
        }
        Ok(())
    }

    fn number(&mut self) -> Result<Value, JsonError> {
        let start = self.pos;
        if self.peek() == Some(b'-') {
            self.pos += 1;
        }
        match self.peek() {
            Some(b'0') => self.pos += 1,
            _ => self.digits()?,
        }
        let mut float = false;
        if self.peek() == Some(b'.') {
            float = true;
            self.pos += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            float = true;
            self.pos += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.pos += 1;
            }
            self.digits()?;
        }
        let text = &self.text[start..self.pos];
        if float {
            return text.parse::<f64>().map(Value::from).map_err(|_| JsonError::Syntax);
        }
        Ok(int_value(text))
    }
}

enum Text<'a> {
    Plain(&'a str),
    Built(String),
}

/// An integer of any size from its decimal digits.
pub fn int_value(text: &str) -> Value {
    if let Ok(n) = text.parse::<i64>() {
        Value::from(n)
    } else if let Ok(n) = text.parse::<i128>() {
        Value::from(n)
    } else {
        Value::from_object(BigInt(text.into()))
    }
}

/// How many bytes come before the next quote, backslash or control character. Eight bytes at a time.
fn plain_run(bytes: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let mut i = 0;
    while let Some(chunk) = bytes.get(i..i + 8) {
        let word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
        let zero = |x: u64| x.wrapping_sub(ONES) & !x & HIGH;
        let quote = zero(word ^ (ONES * u64::from(b'"')));
        let backslash = zero(word ^ (ONES * u64::from(b'\\')));
        let control = word.wrapping_sub(ONES * 0x20) & !word & HIGH;
        let hit = quote | backslash | control;
        if hit != 0 {
            // Borrows only run upwards, so the lowest mark is exact.
            return i + hit.trailing_zeros() as usize / 8;
        }
        i += 8;
    }
    while let Some(&b) = bytes.get(i) {
        if b == b'"' || b == b'\\' || b < 0x20 {
            break;
        }
        i += 1;
    }
    i
}

/// How [`dump`] writes: the arguments of Python's `json.dumps`.
pub struct Style {
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
    pub ensure_ascii: bool,
}

impl Default for Style {
    fn default() -> Style {
        Style {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
            ensure_ascii: false,
        }
    }
}

/// `json.dumps`.
pub fn dump(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(python::type_error("value nested too deeply"));
    }
    budget::check(out.len())?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match python::as_float(value) {
            Some(f) if f.is_nan() => out.push_str("NaN"),
            Some(f) if f.is_infinite() => out.push_str(if f > 0.0 { "Infinity" } else { "-Infinity" }),
            _ => python::write_str(out, value)?,
        },
        ValueKind::String => dump_str(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Map => match value.as_object() {
            Some(object) if python::is_dict(object) => dump_dict(out, object, style, depth)?,
            _ => return Err(python::type_error("object is not JSON serializable")),
        },
        ValueKind::Seq => dump_list(out, value, style, depth)?,
        // minijinja's own lazily joined lists; what Python would call a generator never gets here by another way.
        ValueKind::Iterable => dump_list(out, value, style, depth)?,
        ValueKind::Plain if value.downcast_object_ref::<BigInt>().is_some() => python::write_str(out, value)?,
        _ => return Err(python::type_error("object is not JSON serializable")),
    }
    Ok(())
}

fn line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn dump_list(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    out.push('[');
    let mut empty = true;
    for item in value.try_iter()?.checked() {
        if !empty {
            out.push_str(&style.item_separator);
        }
        empty = false;
        line(out, style, depth + 1);
        dump(out, &item?, style, depth + 1)?;
    }
    if !empty {
        line(out, style, depth);
    }
    out.push(']');
    Ok(())
}

fn dump_dict(out: &mut String, object: &DynObject, style: &Style, depth: usize) -> Result<(), Error> {
    let mut pairs: Vec<(Value, Value)> = object.try_iter_pairs().into_iter().flatten().collect();
    if style.sort_keys {
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
    }
    out.push('{');
    let mut empty = true;
    for (key, item) in pairs {
        if !empty {
            out.push_str(&style.item_separator);
        }
        empty = false;
        line(out, style, depth + 1);
        match key.kind() {
            ValueKind::String => dump_str(out, key.as_str().unwrap_or_default(), style.ensure_ascii),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"');
                dump(out, &key, style, depth + 1)?;
                out.push('"');
            }
            _ => return Err(python::type_error("keys must be str, int, float, bool or None")),
        }
        out.push_str(&style.key_separator);
        dump(out, &item, style, depth + 1)?;
    }
    if !empty {
        line(out, style, depth);
    }
    out.push('}');
    Ok(())
}

fn dump_str(out: &mut String, s: &str, ensure_ascii: bool) {
    out.push('"');
    let mut from = 0;
    for (i, c) in s.char_indices() {
        if c >= ' ' && c != '"' && c != '\\' && (!ensure_ascii || c <= '~') {
            continue;
        }
        out.push_str(&s[from..i]);
        from = i + c.len_utf8();
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            _ => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push_str(&s[from..]);
    out.push('"');
}

/// The `tojson` filter of transformers: `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub fn tojson(state: &minijinja::State, value: &Value, args: &[Value]) -> Result<Value, Error> {
    let mut args = python::Args::new(args, &["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let mut style = Style::default();
    if let Some(v) = args.take(0) {
        style.ensure_ascii = v.is_true();
    }
    if let Some(v) = args.take(1).filter(|v| !v.is_none()) {
        style.indent = Some(match v.as_str() {
            Some(s) => s.to_string(),
            None => {
                let n = python::as_int(&v).ok_or_else(|| python::type_error("indent must be a number or a string"))?;
                " ".repeat(usize::try_from(n.clamp(0, 1024)).unwrap_or(0))
            }
        });
        style.item_separator = ",".into();
    }
    if let Some(v) = args.take(2).filter(|v| !v.is_none()) {
        let parts: Vec<Value> = v.try_iter()?.collect();
        match (parts.as_slice(), parts.first().and_then(|p| p.as_str()), parts.get(1).and_then(|p| p.as_str())) {
            ([_, _], Some(item), Some(key)) => {
                style.item_separator = item.to_string();
                style.key_separator = key.to_string();
            }
            _ => return Err(python::type_error("separators must be two strings")),
        }
    }
    if let Some(v) = args.take(3) {
        style.sort_keys = v.is_true();
    }
    args.done()?;
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    let mut out = String::new();
    dump(&mut out, value, &style, 0)?;
    // Walking a value costs more than copying bytes: four times the price of the result itself.
    state.consume_fuel(out.len() as u64 / 16)?;
    Ok(Value::from(out))
}
