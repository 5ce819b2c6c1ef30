//! Values as Python prints, adds and formats them.

use std::fmt::Write;

use minijinja::{
    value::{DynObject, Kwargs, Object, ObjectRepr, Tuple, ValueKind},
    Error, ErrorKind, State, Value,
};

use super::{
    budget, filters,
    json::BigInt,
    methods::Bound,
};

/// Containers nested deeper than this do not print.
const MAX_DEPTH: usize = 512;

/// An error of the template's own making: wrong types, bad arguments. `text` must be a constant.
pub fn type_error(text: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

/// Arguments of a filter, function or method: positional and by name.
pub struct Args<'a> {
    pos: &'a [Value],
    kwargs: Option<Kwargs>,
    names: &'static [&'static str],
}

impl<'a> Args<'a> {
    /// Splits `args`; `names` are those of the positions, in order.
    pub fn new(args: &'a [Value], names: &'static [&'static str]) -> Result<Args<'a>, Error> {
        let (pos, kwargs) = match args.split_last() {
            Some((last, pos)) if last.is_kwargs() => (pos, Some(Kwargs::try_from(last.clone())?)),
            _ => (args, None),
        };
        if pos.len() > names.len() {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        Ok(Args { pos, kwargs, names })
    }

    /// The argument at position `i`, or of that position's name.
    pub fn take(&mut self, i: usize) -> Option<Value> {
        if let Some(v) = self.pos.get(i) {
            return Some(v.clone());
        }
        let kwargs = self.kwargs.as_ref()?;
        let name = self.names[i];
        if kwargs.has(name) {
            kwargs.get::<Value>(name).ok()
        } else {
            None
        }
    }

    pub fn need(&mut self, i: usize) -> Result<Value, Error> {
        self.take(i).ok_or_else(|| Error::from(ErrorKind::MissingArgument))
    }

    pub fn string(&mut self, i: usize) -> Result<Option<Value>, Error> {
        match self.take(i) {
            Some(v) if v.is_none() => Ok(None),
            Some(v) if v.as_str().is_some() => Ok(Some(v)),
            Some(_) => Err(type_error("argument must be a string")),
            None => Ok(None),
        }
    }

    pub fn int(&mut self, i: usize, default: i64) -> Result<i64, Error> {
        match self.take(i) {
            Some(v) => as_int(&v)
                .map(|n| n.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
                .ok_or_else(|| type_error("argument must be an integer")),
            None => Ok(default),
        }
    }

    pub fn flag(&mut self, i: usize, default: bool) -> bool {
        self.take(i).map_or(default, |v| v.is_true())
    }

    /// Fails if an argument by name was not asked for.
    pub fn done(&self) -> Result<(), Error> {
        match &self.kwargs {
            Some(kwargs) => kwargs.assert_all_used(),
            None => Ok(()),
        }
    }
}

/// Whether an object is what Python would call a dict (or a mapping such as a namespace).
pub fn is_dict(object: &DynObject) -> bool {
    object.repr() == ObjectRepr::Map && object.downcast_ref::<Bound>().is_none()
}

/// Containers nested deeper than this are not compared or hashed: both take native stack for each level.
const MAX_COMPARED: usize = 64;

/// Refuses a value that is nested too deeply to be compared with another one. Where one of two is not, neither is the
/// comparison.
pub fn shallow(value: &Value) -> Result<(), Error> {
    if value.as_object().is_none() {
        return Ok(());
    }
    let mut todo = vec![(value.clone(), 0)];
    while let Some((value, depth)) = todo.pop() {
        if depth > MAX_COMPARED {
            return Err(type_error("value nested too deeply to be compared"));
        }
        let Some(object) = value.as_object() else { continue };
        match object.repr() {
            ObjectRepr::Map => {
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    todo.push((key, depth + 1));
                    todo.push((item, depth + 1));
                }
            }
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                todo.extend(object.try_iter().into_iter().flatten().map(|item| (item, depth + 1)));
            }
            _ => {}
        }
        budget::check(todo.len())?;
    }
    Ok(())
}

/// Refuses what Python cannot hash, and so what cannot be a key.
pub fn hashable(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Map => Err(type_error("unhashable type")),
        ValueKind::Seq | ValueKind::Iterable if !value.is_tuple() => Err(type_error("unhashable type")),
        _ => shallow(value),
    }
}

/// A list or tuple.
pub fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

pub fn as_int(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(value.is_true().into()),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// The float itself, not an integer's conversion.
pub fn as_float(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// What the number or boolean would be as a float.
pub fn to_float(value: &Value) -> Option<f64> {
    as_float(value).or_else(|| as_int(value).map(|n| n as f64))
}

/// `repr(float)`: the shortest digits that read back the same, with an exponent below 1e-4 and from 1e16 on.
pub fn write_float(out: &mut String, f: f64) {
    if f.is_nan() {
        out.push_str("nan");
        return;
    }
    if f.is_infinite() {
        out.push_str(if f > 0.0 { "inf" } else { "-inf" });
        return;
    }
    let text = format!("{f:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let start = out.len();
        let _ = write!(out, "{f}");
        if !out[start..].contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.abs());
    }
}

/// Appends `str(value)`.
pub fn write_str(out: &mut String, value: &Value) -> Result<(), Error> {
    if let Some(s) = value.as_str() {
        out.push_str(s);
        return Ok(());
    }
    write_repr(out, value, 0)
}

/// `str(value)`.
pub fn to_string(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(&mut out, value)?;
    Ok(out)
}

/// Appends `repr(value)`.
pub fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(type_error("value nested too deeply"));
    }
    budget::check(out.len())?;
    match value.kind() {
        ValueKind::Undefined => {
            if depth > 0 {
                out.push_str("Undefined");
            }
        }
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match as_float(value) {
            Some(f) => write_float(out, f),
            None => {
                let _ = write!(out, "{value}");
            }
        },
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            let Some(object) = value.as_object() else { return Ok(()) };
            if let Some(bound) = object.downcast_ref::<Bound>() {
                bound.describe(out);
                return Ok(());
            }
            out.push('{');
            for (i, (key, item)) in object.try_iter_pairs().into_iter().flatten().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &item, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple() || downcast::<filters::Group>(value).is_some();
            out.push(if tuple { '(' } else { '[' });
            let mut n = 0;
            for item in value.try_iter()?.checked() {
                if n > 0 {
                    out.push_str(", ");
                }
                n += 1;
                write_repr(out, &item?, depth + 1)?;
            }
            if tuple && n == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// `repr(str)`.
pub fn write_str_repr(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            c if is_printable(c) => out.push(c),
            c if (c as u32) < 0x100 => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c if (c as u32) < 0x10000 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => {
                let _ = write!(out, "\\U{:08x}", c as u32);
            }
        }
    }
    out.push(quote);
}

/// `str.isprintable` of one character that is not ASCII. Rust escapes the same ones in debug output, and beyond them only
/// combining marks at the start of a string, which the letter in front avoids.
fn is_printable(c: char) -> bool {
    let mut text = String::with_capacity(8);
    text.push('a');
    text.push(c);
    let mut escaped = text.escape_debug();
    escaped.next();
    escaped.next() == Some(c)
}

/// `str.isspace` of one character: Unicode's white space and the four separators that Python counts too.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip()` and its halves.
pub fn strip(s: &str, left: bool, right: bool) -> &str {
    let s = if left { s.trim_start_matches(is_space) } else { s };
    if right {
        s.trim_end_matches(is_space)
    } else {
        s
    }
}

/// A character's title case: the few digraphs that have one of their own, else upper case.
fn push_title(out: &mut String, c: char) {
    match c {
        '\u{1c4}'..='\u{1c6}' => out.push('\u{1c5}'),
        '\u{1c7}'..='\u{1c9}' => out.push('\u{1c8}'),
        '\u{1ca}'..='\u{1cc}' => out.push('\u{1cb}'),
        '\u{1f1}'..='\u{1f3}' => out.push('\u{1f2}'),
        'ß' => out.push_str("Ss"),
        c => out.extend(c.to_uppercase()),
    }
}

/// `str.capitalize`.
pub fn capitalize(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut chars = s.chars();
    if let Some(c) = chars.next() {
        push_title(&mut out, c);
        out.push_str(&chars.as_str().to_lowercase());
    }
    out
}

/// `str.title`: a letter after anything that is no letter is a capital.
pub fn title(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut inside = false;
    for c in s.chars() {
        let cased = c.is_lowercase() || c.is_uppercase() || matches!(c, '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}');
        if !cased {
            out.push(c);
        } else if inside {
            out.extend(c.to_lowercase());
        } else {
            push_title(&mut out, c);
        }
        inside = cased;
    }
    out
}

/// The `title` filter of Jinja, which has its own idea of words: they start after white space, brackets and dashes.
pub fn jinja_title(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut word = String::new();
    let flush = |out: &mut String, word: &mut String| {
        let mut chars = word.chars();
        if let Some(c) = chars.next() {
            out.extend(c.to_uppercase());
            out.push_str(&chars.as_str().to_lowercase());
        }
        word.clear();
    };
    for c in s.chars() {
        if is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<') {
            flush(&mut out, &mut word);
            out.push(c);
        } else {
            word.push(c);
        }
    }
    flush(&mut out, &mut word);
    out
}

/// What it costs to put a value into another one. Freeing takes native stack for each level of nesting, and this bounds
/// the levels.
pub const NESTING_FUEL: u64 = 8;

fn collect(state: &State, value: &Value, out: &mut Vec<Value>) -> Result<(), Error> {
    for item in value.try_iter()?.checked() {
        out.push(item?);
        if out.len().is_multiple_of(64) {
            budget::tick()?;
        }
    }
    state.consume_fuel(NESTING_FUEL + out.len() as u64 / 2)
}

/// A new list of a value's items, which must be iterable.
pub fn list_of(state: &State, value: &Value) -> Result<Vec<Value>, Error> {
    let mut out = Vec::new();
    collect(state, value, &mut out)?;
    Ok(out)
}

/// `a + b`.
pub fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if (a.is_safe() || b.is_safe()) && a.as_str().is_some() && b.as_str().is_some() {
        let (a, b) = (filters::escape(a)?, filters::escape(b)?);
        return Ok(Value::from_safe_string(to_string(&a)? + b.as_str().unwrap_or_default()));
    }
    if let (Some(x), Some(y)) = (a.as_str(), b.as_str()) {
        budget::check(x.len() + y.len())?;
        let mut out = String::with_capacity(x.len() + y.len());
        out.push_str(x);
        out.push_str(y);
        return Ok(Value::from(out));
    }
    if is_list(a) && is_list(b) {
        if a.is_tuple() != b.is_tuple() {
            return Err(type_error("can only concatenate lists with lists and tuples with tuples"));
        }
        let mut items = Vec::with_capacity(a.len().unwrap_or(0).min(1 << 16) + b.len().unwrap_or(0).min(1 << 16));
        collect(state, a, &mut items)?;
        collect(state, b, &mut items)?;
        return Ok(if a.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) });
    }
    if let (Some(x), Some(y)) = (as_int(a), as_int(b)) {
        return int_value(x.checked_add(y));
    }
    match (to_float(a), to_float(b)) {
        (Some(x), Some(y)) => Ok(Value::from(x + y)),
        _ => Err(operands(a, b, "cannot add these types")),
    }
}

fn operands(a: &Value, b: &Value, text: &'static str) -> Error {
    if a.is_undefined() || b.is_undefined() {
        return Error::from(ErrorKind::UndefinedError);
    }
    type_error(text)
}

fn int_value(n: Option<i128>) -> Result<Value, Error> {
    let n = n.ok_or_else(|| type_error("integer too large"))?;
    Ok(i64::try_from(n).map_or_else(|_| Value::from(n), Value::from))
}

/// `a * b`.
pub fn mul(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(x), Some(y)) = (as_int(a), as_int(b)) {
        return int_value(x.checked_mul(y));
    }
    let (seq, n) = match (as_int(a), as_int(b)) {
        (None, Some(n)) => (a, n),
        (Some(n), None) => (b, n),
        _ => (a, 0),
    };
    let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
    if let (Some(s), false) = (seq.as_str(), as_int(a).is_none() && as_int(b).is_none()) {
        let len = s.len().saturating_mul(n);
        budget::check(len)?;
        state.consume_fuel(len as u64 / 64)?;
        return Ok(Value::from(s.repeat(n)));
    }
    if is_list(seq) && (as_int(a).is_some() || as_int(b).is_some()) {
        let items = list_of(state, seq)?;
        let len = items.len().saturating_mul(n);
        budget::check(len.saturating_mul(std::mem::size_of::<Value>()))?;
        state.consume_fuel(len as u64)?;
        let mut out = Vec::with_capacity(len);
        for _ in 0..n {
            out.extend(items.iter().cloned());
        }
        return Ok(if seq.is_tuple() { Value::from(Tuple::from(out)) } else { Value::from(out) });
    }
    match (to_float(a), to_float(b)) {
        (Some(x), Some(y)) => Ok(Value::from(x * y)),
        _ => Err(operands(a, b, "cannot multiply these types")),
    }
}

/// `a % b`: printf-style formatting where `a` is a string.
pub fn rem(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(format) = a.as_str() {
        return percent(state, format, b).map(Value::from);
    }
    if let (Some(x), Some(y)) = (as_int(a), as_int(b)) {
        if y == 0 {
            return Err(type_error("modulo by zero"));
        }
        let r = x.checked_rem(y).unwrap_or(0);
        return int_value(Some(if r != 0 && (r < 0) != (y < 0) { r + y } else { r }));
    }
    match (to_float(a), to_float(b)) {
        (Some(_), Some(0.0)) => Err(type_error("modulo by zero")),
        (Some(x), Some(y)) => {
            let r = x % y;
            Ok(Value::from(if r != 0.0 && (r < 0.0) != (y < 0.0) {
                r + y
            } else if r == 0.0 {
                0f64.copysign(y)
            } else {
                r
            }))
        }
        _ => Err(operands(a, b, "cannot take the remainder of these types")),
    }
}

/// `a ~ b`.
pub fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    let mut out = String::with_capacity(a.as_str().map_or(16, str::len) + b.as_str().map_or(16, str::len));
    write_str(&mut out, a)?;
    budget::check(out.len())?;
    write_str(&mut out, b)?;
    Ok(Value::from(out))
}

/// `value[start:stop:step]`.
pub fn slice(state: &State, value: &Value, bounds: &[Value]) -> Result<Value, Error> {
    let bound = |i: usize| -> Result<Option<i128>, Error> {
        match bounds.get(i) {
            None => Ok(None),
            Some(v) if v.is_none() => Ok(None),
            Some(v) => as_int(v).map(Some).ok_or_else(|| type_error("slice indices must be integers or None")),
        }
    };
    let (start, stop, step) = (bound(0)?, bound(1)?, bound(2)?.unwrap_or(1));
    if step == 0 {
        return Err(type_error("slice step cannot be zero"));
    }
    let indices = |len: usize| -> (i128, i128) {
        let len = len as i128;
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let clamp = |n: i128| if n < 0 { (n + len).max(low) } else { n.min(high) };
        let (first, last) = if step > 0 { (low, high) } else { (high, low) };
        (start.map_or(first, clamp), stop.map_or(last, clamp))
    };
    if let Some(s) = value.as_str() {
        budget::check(s.len())?;
        let ascii = s.is_ascii();
        let len = if ascii { s.len() } else { s.chars().count() };
        let (start, stop) = indices(len);
        if step == 1 {
            let (start, count) = (start as usize, (stop - start).max(0) as usize);
            if ascii {
                return Ok(Value::from(&s[start..start + count]));
            }
            let from = s.char_indices().nth(start).map_or(s.len(), |x| x.0);
            let rest = &s[from..];
            let to = rest.char_indices().nth(count).map_or(rest.len(), |x| x.0);
            return Ok(Value::from(&rest[..to]));
        }
        let chars: Vec<char> = s.chars().collect();
        state.consume_fuel(chars.len() as u64 / 16)?;
        return Ok(Value::from(walk(start, stop, step).map(|i| chars[i]).collect::<String>()));
    }
    if !is_list(value) {
        return Err(operands(value, value, "value cannot be sliced"));
    }
    let items = list_of(state, value)?;
    let (start, stop) = indices(items.len());
    let out: Vec<Value> = walk(start, stop, step).map(|i| items[i].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(out)) } else { Value::from(out) })
}

fn walk(start: i128, stop: i128, step: i128) -> impl Iterator<Item = usize> {
    let mut i = start;
    std::iter::from_fn(move || {
        if (step > 0 && i >= stop) || (step < 0 && i <= stop) {
            return None;
        }
        let at = i;
        i = i.saturating_add(step);
        usize::try_from(at).ok()
    })
}

/// Flags, width and precision of one conversion.
#[derive(Default)]
struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    zero: bool,
    alt: bool,
    width: usize,
    precision: Option<usize>,
}

/// `format % args`.
pub fn percent(state: &State, format: &str, args: &Value) -> Result<String, Error> {
    let values: Vec<Value> = if args.is_tuple() { list_of(state, args)? } else { vec![args.clone()] };
    let mut next = values.into_iter();
    let mut out = String::with_capacity(format.len() + 32);
    let mut chars = format.chars().peekable();
    let mut used_names = false;
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.peek() == Some(&'(') {
            chars.next();
            let mut name = String::new();
            let mut depth = 1;
            for c in chars.by_ref() {
                match c {
                    '(' => depth += 1,
                    ')' => depth -= 1,
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
                name.push(c);
            }
            used_names = true;
            named = Some(args.get_item(&Value::from(name))?);
        }
        let mut spec = Spec::default();
        while let Some(c) = chars.peek() {
            match c {
                '-' => spec.left = true,
                '+' => spec.plus = true,
                ' ' => spec.space = true,
                '0' => spec.zero = true,
                '#' => spec.alt = true,
                _ => break,
            }
            chars.next();
        }
        let number = |chars: &mut std::iter::Peekable<std::str::Chars>, next: &mut dyn Iterator<Item = Value>| -> Result<Option<i128>, Error> {
            if chars.peek() == Some(&'*') {
                chars.next();
                return Ok(Some(next.next().as_ref().and_then(as_int).ok_or_else(|| type_error("* wants an integer"))?));
            }
            let mut n: Option<i128> = None;
            while let Some(d) = chars.peek().and_then(|c| c.to_digit(10)) {
                n = Some(n.unwrap_or(0).saturating_mul(10).saturating_add(d.into()));
                chars.next();
            }
            Ok(n)
        };
        if let Some(n) = number(&mut chars, &mut next)? {
            if n < 0 {
                spec.left = true;
            }
            spec.width = usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX);
        }
        if chars.peek() == Some(&'.') {
            chars.next();
            spec.precision = Some(usize::try_from(number(&mut chars, &mut next)?.unwrap_or(0)).unwrap_or(usize::MAX));
        }
        while matches!(chars.peek(), Some('h' | 'l' | 'L')) {
            chars.next();
        }
        let kind = chars.next().ok_or_else(|| type_error("incomplete format"))?;
        budget::check(out.len().saturating_add(spec.width).saturating_add(spec.precision.unwrap_or(0)))?;
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(v) => v,
            None => next.next().ok_or_else(|| type_error("not enough arguments for format string"))?,
        };
        convert(&mut out, kind, &spec, &value)?;
    }
    if next.next().is_some() && !used_names && args.is_tuple() {
        return Err(type_error("not all arguments converted during string formatting"));
    }
    Ok(out)
}

fn convert(out: &mut String, kind: char, spec: &Spec, value: &Value) -> Result<(), Error> {
    let mut body = String::new();
    let mut sign = "";
    let numeric = !matches!(kind, 's' | 'r' | 'a' | 'c');
    match kind {
        's' | 'r' | 'a' => {
            if kind == 's' {
                write_str(&mut body, value)?;
            } else {
                write_repr(&mut body, value, 1)?;
            }
            if let Some(p) = spec.precision {
                body = body.chars().take(p).collect();
            }
        }
        'c' => match (value.as_str(), as_int(value)) {
            (Some(s), _) if s.chars().count() == 1 => body.push_str(s),
            (None, Some(n)) => body.push(
                u32::try_from(n).ok().and_then(char::from_u32).ok_or_else(|| type_error("%c wants a character"))?,
            ),
            _ => return Err(type_error("%c wants a character")),
        },
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let n = match (as_int(value), as_float(value)) {
                (Some(n), _) => n,
                (None, Some(f)) if matches!(kind, 'd' | 'i' | 'u') && f.is_finite() => f.trunc() as i128,
                _ => return Err(type_error("format wants a number")),
            };
            if n < 0 {
                sign = "-";
            }
            let n = n.unsigned_abs();
            body = match kind {
                'x' => format!("{n:x}"),
                'X' => format!("{n:X}"),
                'o' => format!("{n:o}"),
                _ => n.to_string(),
            };
            if let Some(p) = spec.precision {
                if body.len() < p {
                    body.insert_str(0, &"0".repeat(p - body.len()));
                }
            }
            if spec.alt {
                match kind {
                    'x' => body.insert_str(0, "0x"),
                    'X' => body.insert_str(0, "0X"),
                    'o' => body.insert_str(0, "0o"),
                    _ => {}
                }
            }
        }
        'f' | 'F' | 'e' | 'E' | 'g' | 'G' => {
            let f = to_float(value).ok_or_else(|| type_error("format wants a number"))?;
            if f.is_sign_negative() {
                sign = "-";
            }
            let precision = spec.precision.unwrap_or(6);
            body = float_text(f.abs(), kind, precision, spec.alt);
            if kind.is_uppercase() {
                body = body.to_uppercase();
            }
        }
        _ => return Err(type_error("unsupported format character")),
    }
    if numeric && sign.is_empty() {
        if spec.plus {
            sign = "+";
        } else if spec.space {
            sign = " ";
        }
    }
    let len = sign.len() + body.chars().count();
    let pad = spec.width.saturating_sub(len);
    if spec.left {
        out.push_str(sign);
        out.push_str(&body);
        out.push_str(&" ".repeat(pad));
    } else if spec.zero && numeric {
        out.push_str(sign);
        out.push_str(&"0".repeat(pad));
        out.push_str(&body);
    } else {
        out.push_str(&" ".repeat(pad));
        out.push_str(sign);
        out.push_str(&body);
    }
    Ok(())
}

/// A float that is not negative, in one of printf's ways.
fn float_text(f: f64, kind: char, precision: usize, alt: bool) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return "inf".into();
    }
    let exponential = |digits: usize| -> String {
        let text = format!("{f:.digits$e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let n: i32 = exponent.parse().unwrap_or(0);
        format!("{mantissa}e{}{:02}", if n < 0 { '-' } else { '+' }, n.abs())
    };
    match kind.to_ascii_lowercase() {
        'f' => format!("{f:.precision$}"),
        'e' => exponential(precision),
        _ => {
            let p = precision.max(1);
            let text = format!("{f:.digits$e}", digits = p - 1);
            let exponent: i64 = text.split_once('e').and_then(|x| x.1.parse().ok()).unwrap_or(0);
            let mut text = if exponent < -4 || exponent >= p as i64 {
                exponential(p - 1)
            } else {
                format!("{f:.digits$}", digits = usize::try_from(p as i64 - 1 - exponent).unwrap_or(0))
            };
            if !alt && text.contains('.') {
                let (mantissa, exponent) = match text.split_once('e') {
                    Some((m, e)) => (m.to_string(), format!("e{e}")),
                    None => (text.clone(), String::new()),
                };
                text = mantissa.trim_end_matches('0').trim_end_matches('.').to_string() + &exponent;
            }
            text
        }
    }
}

/// `format.format(*args, **kwargs)`.
pub fn str_format(state: &State, format: &str, args: &[Value]) -> Result<String, Error> {
    // minijinja's own formatting knows fields and specifications; only what it prints by default differs from Python.
    let mut converted = Vec::with_capacity(args.len());
    for arg in args {
        if arg.is_kwargs() {
            let kwargs = Kwargs::try_from(arg.clone())?;
            let mut pairs = Vec::new();
            for name in kwargs.args() {
                pairs.push((name.to_string(), printable(kwargs.get::<Value>(name)?)?));
            }
            converted.push(pairs.iter().map(|(k, v)| (k.as_str(), v.clone())).collect::<Kwargs>().into());
        } else {
            converted.push(printable(arg.clone())?);
        }
    }
    state.consume_fuel(format.len() as u64 / 16)?;
    budget::check(format_width(format)?)?;
    let out = minijinja::formatting::format(minijinja::formatting::FormatStyle::StrFormat, format, &converted)?;
    budget::check(out.len())?;
    Ok(out)
}

/// At least what the widths and precisions of a format string add up to, which minijinja does not bound.
fn format_width(format: &str) -> Result<usize, Error> {
    let mut sum = format.len();
    let mut number: usize = 0;
    let mut specification = false;
    for b in format.bytes() {
        match b {
            b'0'..=b'9' => number = number.saturating_mul(10).saturating_add((b - b'0').into()),
            b':' => specification = true,
            b'}' => specification = false,
            // Such a width is only known when it is too late.
            b'{' if specification && !format.contains("{{") => return Err(type_error("a format inside a format")),
            _ => {}
        }
        if !b.is_ascii_digit() {
            sum = sum.saturating_add(number);
            number = 0;
        }
    }
    Ok(sum.saturating_add(number))
}

fn printable(value: Value) -> Result<Value, Error> {
    shallow(&value)?;
    let special = match as_float(&value) {
        Some(f) => f.abs() >= 1e16 || (f != 0.0 && f.abs() < 1e-4) || !f.is_finite(),
        None => is_list(&value),
    };
    if special || value.downcast_object_ref::<BigInt>().is_some() {
        return to_string(&value).map(Value::from);
    }
    Ok(value)
}

/// The value as an object of type `T`.
pub fn downcast<T: Object + 'static>(value: &Value) -> Option<&T> {
    value.downcast_object_ref::<T>()
}
