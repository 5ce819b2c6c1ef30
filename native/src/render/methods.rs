//! The methods of Python's str, dict, list and tuple that a sandboxed template may call.

use std::sync::Arc;

use minijinja::{
    value::{Object, ObjectRepr, Tuple, ValueKind},
    Error, ErrorKind, State, Value,
};

use super::{
    budget,
    python::{self, is_space, type_error, Args},
};

const STR: &[&str] = &[
    "capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find", "format", "format_map",
    "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
    "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "maketrans", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill",
];
const DICT: &[&str] = &[
    "clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
];
/// What the immutable sandbox hides of a dict: asking for it gives something undefined.
const DICT_UNSAFE: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const LIST: &[&str] = &[
    "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort",
];
const LIST_UNSAFE: &[&str] = &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const TUPLE: &[&str] = &["count", "index"];

/// Whether some type has a method of this name: only then does an attribute need more than a look-up by key.
pub fn is_method_name(name: &str) -> bool {
    [STR, DICT, LIST].iter().any(|names| names.contains(&name))
}

/// A method that was looked up and not called: it is true, defined, callable, and has no items.
#[derive(Debug)]
pub struct Bound {
    receiver: Value,
    name: &'static str,
    kind: &'static str,
}

impl Bound {
    pub fn describe(&self, out: &mut String) {
        out.push_str("<built-in method ");
        out.push_str(self.name);
        out.push_str(" of ");
        out.push_str(self.kind);
        out.push_str(" object>");
    }
}

impl Object for Bound {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        call(state, &self.receiver, self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        self.describe(&mut out);
        f.write_str(&out)
    }
}

/// The method `name` of `value`'s type. Methods that the sandbox hides are there but undefined.
fn bound(value: &Value, name: &str) -> Option<Value> {
    let (kind, names, hidden): (_, _, &[&str]) = match value.kind() {
        ValueKind::String => ("str", STR, &[]),
        ValueKind::Map if is_plain_dict(value) => ("dict", DICT, DICT_UNSAFE),
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => ("tuple", TUPLE, &[]),
        ValueKind::Seq => ("list", LIST, LIST_UNSAFE),
        _ => return None,
    };
    let name: &'static str = names.iter().find(|n| **n == name)?;
    if hidden.contains(&name) {
        return Some(Value::UNDEFINED);
    }
    Some(Value::from_object(Bound { receiver: value.clone(), name, kind }))
}

/// A dict of Python's, not a namespace or another of minijinja's objects.
pub fn is_plain_dict(value: &Value) -> bool {
    python::downcast::<super::json::Dict>(value).is_some()
        || python::downcast::<indexmap::IndexMap<Value, Value>>(value).is_some()
}

/// `value.name`: Jinja asks for the attribute first, then for the item.
pub fn attr(value: &Value, name: &str) -> Result<Value, Error> {
    match bound(value, name) {
        Some(method) => Ok(method),
        None => value.get_attr(name),
    }
}

/// `value[key]`: Jinja asks for the item first, then for the attribute.
pub fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Bool || value.is_none() {
        return Ok(Value::UNDEFINED);
    }
    if python::hashable(key).is_err() {
        return Ok(Value::UNDEFINED);
    }
    let found = match (value.kind(), key.kind()) {
        // A float is no index.
        (ValueKind::Seq | ValueKind::Iterable | ValueKind::String, ValueKind::Number) if !key.is_integer() => {
            Value::UNDEFINED
        }
        (ValueKind::Seq | ValueKind::Iterable | ValueKind::String, ValueKind::Bool) => {
            value.get_item(&Value::from(i64::from(key.is_true())))?
        }
        _ => value.get_item(key)?,
    };
    if !found.is_undefined() {
        return Ok(found);
    }
    Ok(key.as_str().and_then(|name| bound(value, name)).unwrap_or(Value::UNDEFINED))
}

/// Calls the method `name` of `value`. It is minijinja's callback for methods it does not know.
pub fn call(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    budget::tick()?;
    match value.kind() {
        ValueKind::String => string(state, value.as_str().unwrap_or_default(), name, args),
        ValueKind::Map => dict(state, value, name, args),
        ValueKind::Seq | ValueKind::Iterable => list(state, value, name, args),
        ValueKind::Number => number(value, name),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn number(value: &Value, name: &str) -> Result<Value, Error> {
    match (name, python::to_float(value)) {
        ("is_integer", Some(f)) => Ok(Value::from(f.fract() == 0.0)),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn dict(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(object) = value.as_object() else { return Err(Error::from(ErrorKind::UnknownMethod)) };
    match name {
        "get" => {
            let mut args = Args::new(args, &["key", "default"])?;
            let key = args.need(0)?;
            python::hashable(&key)?;
            Ok(match object.get_value(&key) {
                Some(v) => v,
                None => args.take(1).unwrap_or_else(|| Value::from(())),
            })
        }
        "items" | "keys" | "values" | "copy" => {
            Args::new(args, &[])?;
            let pairs = object.try_iter_pairs().into_iter().flatten();
            let size = object.enumerator_len().unwrap_or(0) as u64;
            state.consume_fuel(python::NESTING_FUEL + size / 2)?;
            Ok(match name {
                "items" => Value::from(pairs.map(|(k, v)| Value::from(Tuple::from([k, v]))).collect::<Vec<_>>()),
                "keys" => Value::from(pairs.map(|(k, _)| k).collect::<Vec<_>>()),
                "values" => Value::from(pairs.map(|(_, v)| v).collect::<Vec<_>>()),
                _ => Value::from_pairs(pairs),
            })
        }
        _ if is_plain_dict(value) && DICT_UNSAFE.contains(&name) => Err(type_error("the sandbox forbids changing a dict")),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn list(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match name {
        "count" => {
            let mut args = Args::new(args, &["value"])?;
            let what = args.need(0)?;
            python::shallow(&what)?;
            let items = python::list_of(state, value)?;
            Ok(Value::from(items.iter().filter(|item| **item == what).count()))
        }
        "index" => {
            let mut args = Args::new(args, &["value"])?;
            let what = args.need(0)?;
            python::shallow(&what)?;
            let items = python::list_of(state, value)?;
            items.iter().position(|item| *item == what).map(Value::from).ok_or_else(|| type_error("value is not in list"))
        }
        "copy" if !value.is_tuple() => Ok(Value::from(python::list_of(state, value)?)),
        _ if LIST_UNSAFE.contains(&name) => Err(type_error("the sandbox forbids changing a list")),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// The pieces of `split` and `rsplit` without a separator: runs of white space divide.
fn split_space(s: &str, max: i64, from_right: bool) -> Vec<Value> {
    let mut out = Vec::new();
    let mut rest = s;
    if from_right {
        rest = python::strip(rest, false, true);
        while !rest.is_empty() {
            if max >= 0 && out.len() as i64 == max {
                out.push(Value::from(rest));
                break;
            }
            match rest.char_indices().rev().find(|(_, c)| is_space(*c)) {
                Some((i, c)) => {
                    out.push(Value::from(&rest[i + c.len_utf8()..]));
                    rest = python::strip(&rest[..i], false, true);
                }
                None => {
                    out.push(Value::from(rest));
                    break;
                }
            }
        }
        out.reverse();
        return out;
    }
    rest = python::strip(rest, true, false);
    while !rest.is_empty() {
        if max >= 0 && out.len() as i64 == max {
            out.push(Value::from(rest));
            break;
        }
        match rest.find(is_space) {
            Some(i) => {
                out.push(Value::from(&rest[..i]));
                rest = python::strip(&rest[i..], true, false);
            }
            None => {
                out.push(Value::from(rest));
                break;
            }
        }
    }
    out
}

fn split(s: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let mut args = Args::new(args, &["sep", "maxsplit"])?;
    let sep = args.string(0)?;
    let max = args.int(1, -1)?;
    args.done()?;
    let Some(sep) = sep else { return Ok(Value::from(split_space(s, max, from_right))) };
    let sep = sep.as_str().unwrap_or_default();
    if sep.is_empty() {
        return Err(type_error("empty separator"));
    }
    let mut out: Vec<Value> = match (usize::try_from(max), from_right) {
        (Ok(n), false) => s.splitn(n.saturating_add(1), sep).map(Value::from).collect(),
        (Ok(n), true) => s.rsplitn(n.saturating_add(1), sep).map(Value::from).collect(),
        (Err(_), false) => s.split(sep).map(Value::from).collect(),
        (Err(_), true) => s.rsplit(sep).map(Value::from).collect(),
    };
    if from_right {
        out.reverse();
    }
    Ok(Value::from(out))
}

/// Where Python ends lines: beyond \n, \r and \r\n also a few separators.
fn splitlines(s: &str, keep: bool) -> Vec<Value> {
    let mut out = Vec::new();
    let mut start = 0;
    let mut chars = s.char_indices().peekable();
    while let Some((i, c)) = chars.next() {
        if !matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}') {
            continue;
        }
        let mut end = i + c.len_utf8();
        if c == '\r' && chars.peek().is_some_and(|(_, c)| *c == '\n') {
            chars.next();
            end += 1;
        }
        out.push(Value::from(&s[start..if keep { end } else { i }]));
        start = end;
    }
    if start < s.len() {
        out.push(Value::from(&s[start..]));
    }
    out
}

/// The lines of `s`, without their ends.
pub fn lines(s: &str) -> Vec<Value> {
    splitlines(s, false)
}

/// `startswith` and `endswith`: one string or a tuple of them, and optional bounds.
fn affix(s: &str, args: &[Value], matches: fn(&str, &str) -> bool) -> Result<Value, Error> {
    let mut args = Args::new(args, &["prefix", "start", "end"])?;
    let what = args.need(0)?;
    let s = window(s, args.take(1), args.take(2))?;
    if let Some(affix) = what.as_str() {
        return Ok(Value::from(s.is_some_and(|s| matches(s, affix))));
    }
    if !what.is_tuple() {
        return Err(type_error("startswith wants a string or a tuple of strings"));
    }
    for affix in what.try_iter()?.checked() {
        let affix = affix?;
        let affix = affix.as_str().ok_or_else(|| type_error("startswith wants a string or a tuple of strings"))?;
        if s.is_some_and(|s| matches(s, affix)) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// `s[start:end]`; none if the start lies beyond the end, where Python finds nothing, not even an empty string.
fn window(s: &str, start: Option<Value>, end: Option<Value>) -> Result<Option<&str>, Error> {
    if start.is_none() && end.is_none() {
        return Ok(Some(s));
    }
    let len = s.chars().count() as i128;
    let bound = |v: Option<Value>, default: i128| -> Result<i128, Error> {
        match v.filter(|v| !v.is_none()) {
            None => Ok(default),
            Some(v) => {
                let n = python::as_int(&v).ok_or_else(|| type_error("slice indices must be integers or None"))?;
                Ok(if n < 0 { (n + len).max(0) } else { n })
            }
        }
    };
    let (start, end) = (bound(start, 0)?, bound(end, len)?.min(len));
    if start > end {
        return Ok(None);
    }
    let byte = |n: i128| s.char_indices().nth(n as usize).map_or(s.len(), |x| x.0);
    Ok(Some(&s[byte(start)..byte(end)]))
}

fn find(s: &str, args: &[Value], from_right: bool) -> Result<Option<usize>, Error> {
    let mut args = Args::new(args, &["sub", "start", "end"])?;
    let what = args.need(0)?;
    let what = what.as_str().ok_or_else(|| type_error("argument must be a string"))?;
    let Some(inside) = window(s, args.take(1), args.take(2))? else { return Ok(None) };
    let offset = inside.as_ptr() as usize - s.as_ptr() as usize;
    let at = if from_right { inside.rfind(what) } else { inside.find(what) };
    Ok(at.map(|i| s[..offset + i].chars().count()))
}

fn pad(s: &str, args: &[Value], left: fn(usize, usize) -> usize) -> Result<Value, Error> {
    let mut args = Args::new(args, &["width", "fillchar"])?;
    let width = usize::try_from(args.int(0, 0)?.max(0)).unwrap_or(0);
    let fill = args.string(1)?;
    let fill = fill.as_ref().and_then(|v| v.as_str()).unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(type_error("the fill character must be one character"));
    }
    budget::check(width.saturating_mul(fill.len()))?;
    let missing = width.saturating_sub(s.chars().count());
    let before = left(missing, width);
    Ok(Value::from(fill.repeat(before) + s + &fill.repeat(missing - before)))
}

fn check_all(s: &str, f: impl Fn(char) -> bool) -> Value {
    Value::from(!s.is_empty() && s.chars().all(f))
}

/// Superscript digits and the like are digits that are no decimals; this is all of Unicode's that matter here.
fn is_digit(c: char) -> bool {
    is_decimal(c) || matches!(c, '²' | '³' | '¹' | '\u{2070}' | '\u{2074}'..='\u{2079}' | '\u{2080}'..='\u{2089}' | '\u{2460}'..='\u{2468}')
}

/// Decimal digits of the scripts in common use: each run of ten starts at one of these.
fn is_decimal(c: char) -> bool {
    const ZEROS: &[u32] = &[
        0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xDE6, 0xE50, 0xED0,
        0xF20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620,
        0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10,
    ];
    let c = c as u32;
    ZEROS.iter().any(|&zero| (zero..zero + 10).contains(&c))
}

fn cased(s: &str, wanted: fn(char) -> bool, other: fn(char) -> bool) -> Value {
    Value::from(s.chars().any(wanted) && !s.chars().any(other))
}

fn string(state: &State, s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let none = || Args::new(args, &[]).map(|_| ());
    let strip = |left: bool, right: bool| -> Result<Value, Error> {
        let mut args = Args::new(args, &["chars"])?;
        let chars = args.string(0)?;
        let Some(chars) = chars.as_ref().and_then(|v| v.as_str()) else {
            let stripped = python::strip(s, left, right);
            return Ok(Value::from(stripped));
        };
        let mut out = s;
        if left {
            out = out.trim_start_matches(|c| chars.contains(c));
        }
        if right {
            out = out.trim_end_matches(|c| chars.contains(c));
        }
        Ok(Value::from(out))
    };
    match name {
        "strip" => strip(true, true),
        "lstrip" => strip(true, false),
        "rstrip" => strip(false, true),
        "upper" => none().map(|()| Value::from(s.to_uppercase())),
        "lower" | "casefold" => none().map(|()| {
            Value::from(if name == "casefold" { s.to_lowercase().replace('ß', "ss") } else { s.to_lowercase() })
        }),
        "capitalize" => none().map(|()| Value::from(python::capitalize(s))),
        "title" => none().map(|()| Value::from(python::title(s))),
        "swapcase" => none().map(|()| {
            let mut out = String::with_capacity(s.len());
            for c in s.chars() {
                if c.is_uppercase() {
                    out.extend(c.to_lowercase());
                } else {
                    out.extend(c.to_uppercase());
                }
            }
            Value::from(out)
        }),
        "islower" => none().map(|()| cased(s, char::is_lowercase, char::is_uppercase)),
        "isupper" => none().map(|()| cased(s, char::is_uppercase, char::is_lowercase)),
        "istitle" => none().map(|()| Value::from(s.chars().any(|c| c.is_alphabetic()) && python::title(s) == s)),
        "isspace" => none().map(|()| check_all(s, is_space)),
        "isdecimal" => none().map(|()| check_all(s, is_decimal)),
        "isdigit" => none().map(|()| check_all(s, is_digit)),
        "isnumeric" => none().map(|()| check_all(s, char::is_numeric)),
        "isalpha" => none().map(|()| check_all(s, |c| c.is_alphabetic())),
        "isalnum" => none().map(|()| check_all(s, char::is_alphanumeric)),
        "isascii" => none().map(|()| Value::from(s.is_ascii())),
        "isidentifier" => none().map(|()| {
            let mut chars = s.chars();
            let first = chars.next().is_some_and(|c| c == '_' || c.is_alphabetic());
            Value::from(first && chars.all(|c| c == '_' || c.is_alphanumeric()))
        }),
        "isprintable" => none().map(|()| {
            let mut out = String::new();
            python::write_str_repr(&mut out, &s.replace(['\\', '\''], ""));
            Value::from(!out.contains('\\'))
        }),
        "startswith" => affix(s, args, |s, affix| s.starts_with(affix)),
        "endswith" => affix(s, args, |s, affix| s.ends_with(affix)),
        "split" => split(s, args, false),
        "rsplit" => split(s, args, true),
        "splitlines" => {
            let keep = Args::new(args, &["keepends"])?.flag(0, false);
            Ok(Value::from(splitlines(s, keep)))
        }
        "partition" | "rpartition" => {
            let sep = Args::new(args, &["sep"])?.need(0)?;
            let sep = sep.as_str().filter(|s| !s.is_empty()).ok_or_else(|| type_error("empty separator"))?;
            let at = if name == "partition" { s.find(sep) } else { s.rfind(sep) };
            let parts = match at {
                Some(i) => [&s[..i], sep, &s[i + sep.len()..]],
                None if name == "partition" => [s, "", ""],
                None => ["", "", s],
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "replace" => {
            let mut args = Args::new(args, &["old", "new", "count"])?;
            let (old, new, count) = (args.need(0)?, args.need(1)?, args.int(2, -1)?);
            let (Some(old), Some(new)) = (old.as_str(), new.as_str()) else {
                return Err(type_error("replace wants strings"));
            };
            let most = if old.is_empty() { s.chars().count() + 1 } else { s.len() / old.len() };
            let most = usize::try_from(count).map_or(most, |n| n.min(most));
            if new.len() > old.len() {
                budget::check(s.len().saturating_add(most.saturating_mul(new.len() - old.len())))?;
            }
            Ok(Value::from(match usize::try_from(count) {
                Ok(n) => s.replacen(old, new, n),
                Err(_) => s.replace(old, new),
            }))
        }
        "removeprefix" | "removesuffix" => {
            let affix = Args::new(args, &["prefix"])?.need(0)?;
            let affix = affix.as_str().ok_or_else(|| type_error("argument must be a string"))?;
            let out = if name == "removeprefix" { s.strip_prefix(affix) } else { s.strip_suffix(affix) };
            Ok(Value::from(out.unwrap_or(s)))
        }
        "find" | "rfind" => Ok(Value::from(find(s, args, name == "rfind")?.map_or(-1, |i| i as i64))),
        "index" | "rindex" => {
            find(s, args, name == "rindex")?.map(Value::from).ok_or_else(|| type_error("substring not found"))
        }
        "count" => {
            let mut args = Args::new(args, &["sub", "start", "end"])?;
            let what = args.need(0)?;
            let what = what.as_str().ok_or_else(|| type_error("argument must be a string"))?;
            let inside = window(s, args.take(1), args.take(2))?;
            Ok(Value::from(inside.map_or(0, |s| s.matches(what).count())))
        }
        "join" => {
            let items = Args::new(args, &["iterable"])?.need(0)?;
            let mut out = String::new();
            for (i, item) in items.try_iter()?.checked().enumerate() {
                let item = item?;
                if i > 0 {
                    out.push_str(s);
                }
                out.push_str(item.as_str().ok_or_else(|| type_error("join wants strings"))?);
                budget::check(out.len())?;
            }
            Ok(Value::from(out))
        }
        "center" => pad(s, args, |missing, width| missing / 2 + (missing & width & 1)),
        "ljust" => pad(s, args, |_, _| 0),
        "rjust" => pad(s, args, |missing, _| missing),
        "zfill" => {
            let width = usize::try_from(Args::new(args, &["width"])?.int(0, 0)?.max(0)).unwrap_or(0);
            budget::check(width)?;
            let (sign, digits) = match s.chars().next() {
                Some('+' | '-') => s.split_at(1),
                _ => ("", s),
            };
            Ok(Value::from(format!("{sign}{}{digits}", "0".repeat(width.saturating_sub(s.chars().count())))))
        }
        "expandtabs" => {
            let size = usize::try_from(Args::new(args, &["tabsize"])?.int(0, 8)?.clamp(0, 1024)).unwrap_or(0);
            let mut out = String::with_capacity(s.len());
            let mut column = 0;
            for c in s.chars() {
                match c {
                    '\t' => {
                        let n = if size == 0 { 0 } else { size - column % size };
                        out.push_str(&" ".repeat(n));
                        column += n;
                    }
                    '\n' | '\r' => {
                        out.push(c);
                        column = 0;
                    }
                    c => {
                        out.push(c);
                        column += 1;
                    }
                }
                budget::check(out.len())?;
            }
            Ok(Value::from(out))
        }
        "format" => python::str_format(state, s, args).map(Value::from),
        "format_map" => {
            let map = Args::new(args, &["mapping"])?.need(0)?;
            let pairs: Vec<(String, Value)> = map
                .as_object()
                .and_then(|o| o.try_iter_pairs())
                .into_iter()
                .flatten()
                .filter_map(|(k, v)| Some((k.as_str()?.to_string(), v)))
                .collect();
            let kwargs: minijinja::value::Kwargs = pairs.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
            python::str_format(state, s, &[kwargs.into()]).map(Value::from)
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
