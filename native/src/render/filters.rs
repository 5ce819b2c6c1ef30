//! Jinja's filters, tests and functions where minijinja's own differ from Python's, and those it lacks.

use std::sync::{
    atomic::{AtomicUsize, Ordering},
    Arc,
};

use minijinja::{
    value::{ArgType, Kwargs, Object, ObjectRepr, Tuple, ValueKind},
    Environment, Error, ErrorKind, State, Value,
};

use super::{
    budget, clock,
    json::{self, BigInt},
    methods,
    python::{self, type_error, Args},
    Fault,
};

/// Names of the filters that the compiler puts in place of operators. No template can write them.
pub const ADD: &str = "+";
pub const MUL: &str = "*";
pub const REM: &str = "%";
pub const CONCAT: &str = "~";
pub const ATTR: &str = ".";
pub const ITEM: &str = "[]";
pub const SLICE: &str = "[:]";
pub const ITERATE: &str = "for";
pub const SHALLOW: &str = "==";
pub const IN: &str = "in";
pub const KEY: &str = "{}";
pub const NEST: &str = "[";

/// All remaining arguments, those by name among them as the last one.
struct Rest(Vec<Value>);

impl std::ops::Deref for Rest {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.0
    }
}

impl<'a> ArgType<'a> for Rest {
    type Output = Self;

    fn from_value(value: Option<&'a Value>) -> Result<Self, Error> {
        Ok(Rest(value.cloned().into_iter().collect()))
    }

    fn from_state_and_values(_: Option<&'a State>, values: &'a [Value], offset: usize) -> Result<(Self, usize), Error> {
        let args = values.get(offset..).unwrap_or_default();
        Ok((Rest(args.to_vec()), args.len()))
    }

    fn from_state_and_values_mut(_: Option<&State>, values: &'a [Value], offset: usize) -> Result<(Self, usize), Error> {
        let args = values.get(offset..).unwrap_or_default();
        Ok((Rest(args.to_vec()), args.len()))
    }
}

fn text(value: &Value) -> Result<String, Error> {
    python::to_string(value)
}

/// Applies `f` to `str(value)` without copying a string first.
fn with_text<R>(value: &Value, f: impl FnOnce(&str) -> R) -> Result<R, Error> {
    match value.as_str() {
        Some(s) => Ok(f(s)),
        None => Ok(f(&text(value)?)),
    }
}

pub fn register(env: &mut Environment<'static>) {
    operators(env);
    strings(env);
    lists(env);
    numbers(env);
    tests(env);
    functions(env);
}

fn operators(env: &mut Environment<'static>) {
    env.add_filter(ADD, |state: &State, a: &Value, b: &Value| python::add(state, a, b));
    env.add_filter(MUL, |state: &State, a: &Value, b: &Value| python::mul(state, a, b));
    env.add_filter(REM, |state: &State, a: &Value, b: &Value| python::rem(state, a, b));
    env.add_filter(CONCAT, |a: &Value, b: &Value| python::concat(a, b));
    env.add_filter(ATTR, |value: &Value, name: &Value| methods::attr(value, name.as_str().unwrap_or_default()));
    env.add_filter(ITEM, |value: &Value, key: &Value| methods::item(value, key));
    env.add_filter(IN, |value: &Value, container: &Value| contains(value, container));
    env.add_filter(NEST, |state: &State, value: &Value, depth: u64| {
        state.consume_fuel(depth.saturating_mul(python::NESTING_FUEL)).map(|()| value.clone())
    });
    env.add_filter(SHALLOW, |value: &Value| python::shallow(value).map(|()| value.clone()));
    env.add_filter(KEY, |value: &Value| python::hashable(value).map(|()| value.clone()));
    env.add_filter(ITERATE, |value: &Value| iterable(value).map(|()| value.clone()));
    env.add_filter(SLICE, |state: &State, value: &Value, bounds: Rest| python::slice(state, value, &bounds));
}

/// Marks a string as safe, like Markup in Python: what is added to it is escaped.
fn markup(text: String) -> Value {
    Value::from_safe_string(text)
}

/// The result of a method that keeps a string's safety.
fn like(value: &Value, text: String) -> Value {
    if value.is_safe() {
        markup(text)
    } else {
        Value::from(text)
    }
}

pub fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    force_escape(value)
}

fn force_escape(value: &Value) -> Result<Value, Error> {
    with_text(value, |s| {
        let mut out = String::with_capacity(s.len() + 16);
        for c in s.chars() {
            match c {
                '&' => out.push_str("&amp;"),
                '<' => out.push_str("&lt;"),
                '>' => out.push_str("&gt;"),
                '\'' => out.push_str("&#39;"),
                '"' => out.push_str("&#34;"),
                c => out.push(c),
            }
        }
        markup(out)
    })
}

fn strings(env: &mut Environment<'static>) {
    env.add_filter("tojson", |state: &State, value: &Value, args: Rest| json::tojson(state, value, &args));
    env.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => text(value).map(Value::from),
    });
    env.add_filter("safe", |value: &Value| text(value).map(markup));
    env.add_filter("e", |value: &Value| escape(value));
    env.add_filter("escape", |value: &Value| escape(value));
    env.add_filter("forceescape", |value: &Value| force_escape(value));
    env.add_filter("upper", |value: &Value| with_text(value, |s| like(value, s.to_uppercase())));
    env.add_filter("lower", |value: &Value| with_text(value, |s| like(value, s.to_lowercase())));
    env.add_filter("capitalize", |value: &Value| with_text(value, |s| like(value, python::capitalize(s))));
    env.add_filter("title", |value: &Value| with_text(value, |s| Value::from(python::jinja_title(s))));
    env.add_filter("trim", |state: &State, value: &Value, args: Rest| {
        let stripped = methods::call(state, &Value::from(text(value)?), "strip", &args)?;
        Ok(if value.is_safe() { markup(text(&stripped)?) } else { stripped })
    });
    env.add_filter("replace", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["old", "new", "count"])?;
        let (old, new) = (text(&args.need(0)?)?, text(&args.need(1)?)?);
        let count = args.take(2).filter(|v| !v.is_none()).unwrap_or_else(|| Value::from(-1));
        methods::call(state, &Value::from(text(value)?), "replace", &[Value::from(old), Value::from(new), count])
    });
    env.add_filter("format", |state: &State, value: &Value, args: Rest| {
        let format = text(value)?;
        let values = match args.split_last() {
            Some((last, rest)) if last.is_kwargs() => {
                if !rest.is_empty() {
                    return Err(type_error("can't handle positional and keyword arguments at the same time"));
                }
                last.clone()
            }
            _ => Value::from(Tuple::from(args.to_vec())),
        };
        python::percent(state, &format, &values).map(Value::from)
    });
    env.add_filter("join", join);
    env.add_filter("indent", |value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["width", "first", "blank"])?;
        let width = args.take(0).unwrap_or_else(|| Value::from(4));
        let pad = match width.as_str() {
            Some(s) => s.to_string(),
            None => " ".repeat(usize::try_from(python::as_int(&width).unwrap_or(0).clamp(0, 4096)).unwrap_or(0)),
        };
        let (first, blank) = (args.flag(1, false), args.flag(2, false));
        let s = text(value)? + "\n";
        let mut out = String::with_capacity(s.len() * 2);
        let lines = methods::lines(&s);
        for (i, line) in lines.iter().enumerate() {
            if i > 0 {
                out.push('\n');
            }
            let line = line.as_str().unwrap_or_default();
            if if i == 0 { first } else { blank || !line.is_empty() } {
                out.push_str(&pad);
            }
            out.push_str(line);
            budget::check(out.len())?;
        }
        Ok(Value::from(out))
    });
    env.add_filter("wordcount", |value: &Value| {
        with_text(value, |s| {
            let mut n = 0;
            let mut inside = false;
            for c in s.chars() {
                let word = c.is_alphanumeric() || c == '_';
                n += usize::from(word && !inside);
                inside = word;
            }
            Value::from(n)
        })
    });
    env.add_filter("center", |state: &State, value: &Value, args: Rest| {
        let width = Args::new(&args, &["width"])?.int(0, 80)?;
        methods::call(state, &Value::from(text(value)?), "center", &[Value::from(width)])
    });
    env.add_filter("truncate", |value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["length", "killwords", "end", "leeway"])?;
        let (length, kill) = (args.int(0, 255)?, args.flag(1, false));
        let end = args.string(2)?;
        let end = end.as_ref().and_then(|v| v.as_str()).unwrap_or("...");
        let leeway = args.int(3, 5)?;
        with_text(value, |s| {
            let n = s.chars().count() as i64;
            if n <= length + leeway {
                return Value::from(s);
            }
            let keep = usize::try_from(length - end.chars().count() as i64).unwrap_or(0);
            let cut: String = s.chars().take(keep).collect();
            let cut = if kill { cut.as_str() } else { cut.rsplit_once(' ').map_or(cut.as_str(), |x| x.0) };
            Value::from(format!("{cut}{end}"))
        })
    });
    env.add_filter("striptags", |value: &Value| {
        with_text(value, |s| {
            let mut out = String::with_capacity(s.len());
            let mut rest = s;
            while let Some(start) = rest.find('<') {
                let Some(end) = rest[start..].find('>') else { break };
                out.push_str(&rest[..start]);
                rest = &rest[start + end + 1..];
            }
            out.push_str(rest);
            Value::from(out.split(python::is_space).filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" "))
        })
    });
}

/// `join(value, d="", attribute=None)`.
fn join(value: &Value, args: Rest) -> Result<Value, Error> {
    iterable(value)?;
    let mut args = Args::new(&args, &["d", "attribute"])?;
    let separator = args.take(0).map(|v| text(&v)).transpose()?.unwrap_or_default();
    let attribute = args.take(1).filter(|v| !v.is_none());
    let mut out = String::new();
    for (i, item) in value.try_iter()?.checked().enumerate() {
        if i > 0 {
            out.push_str(&separator);
        }
        let mut item = item?;
        if let Some(path) = &attribute {
            item = lookup(&item, path)?;
        }
        python::write_str(&mut out, &item)?;
        budget::check(out.len())?;
    }
    Ok(Value::from(out))
}

/// What `map(attribute=…)` and its like look up: a dotted path, or a number.
fn lookup(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return methods::item(value, path) };
    let mut found = value.clone();
    for part in path.split('.') {
        found = match part.parse::<u32>() {
            Ok(n) => methods::item(&found, &Value::from(n))?,
            Err(_) => methods::item(&found, &Value::from(part))?,
        };
    }
    Ok(found)
}

fn len(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::String | ValueKind::Map | ValueKind::Seq => {
            value.len().ok_or_else(|| type_error("object has no len()"))
        }
        ValueKind::Iterable => match value.len() {
            Some(n) => Ok(n),
            None => Ok(value.try_iter()?.count()),
        },
        _ => Err(type_error("object has no len()")),
    }
}

fn iterable(value: &Value) -> Result<(), Error> {
    if value.is_none() {
        return Err(type_error("'NoneType' object is not iterable"));
    }
    Ok(())
}

/// What `sort` and its like compare strings by, unless told otherwise.
fn fold(value: Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(s) if !case_sensitive => Value::from(s.to_lowercase()),
        _ => value,
    }
}

fn sort_key(value: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let key = raw_sort_key(value, attribute, case_sensitive)?;
    python::shallow(&key)?;
    Ok(key)
}

fn raw_sort_key(value: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    match attribute {
        None => Ok(fold(value.clone(), case_sensitive)),
        Some(path) => match path.as_str() {
            Some(paths) if paths.contains(',') => {
                let mut keys = Vec::new();
                for path in paths.split(',') {
                    keys.push(fold(lookup(value, &Value::from(path))?, case_sensitive));
                }
                Ok(Value::from(keys))
            }
            _ => Ok(fold(lookup(value, path)?, case_sensitive)),
        },
    }
}

fn sorted(state: &State, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>, Error> {
    let n = keyed.len() as u64;
    state.consume_fuel(n * u64::from(64 - n.leading_zeros()))?;
    // Python's sort is stable, in reverse too.
    if reverse {
        keyed.sort_by(|a, b| b.0.cmp(&a.0));
    } else {
        keyed.sort_by(|a, b| a.0.cmp(&b.0));
    }
    Ok(keyed.into_iter().map(|x| x.1).collect())
}

fn lists(env: &mut Environment<'static>) {
    env.add_filter("length", |value: &Value| len(value).map(Value::from));
    env.add_filter("count", |value: &Value| len(value).map(Value::from));
    env.add_filter("list", |state: &State, value: &Value| {
        iterable(value)?;
        python::list_of(state, value).map(Value::from)
    });
    env.add_filter("first", |value: &Value| {
        iterable(value)?;
        Ok::<_, Error>(value.try_iter()?.next().unwrap_or(Value::UNDEFINED))
    });
    env.add_filter("last", |state: &State, value: &Value| {
        iterable(value)?;
        if matches!(value.kind(), ValueKind::Seq | ValueKind::String) {
            return Ok(value.get_item(&Value::from(-1)).unwrap_or(Value::UNDEFINED));
        }
        Ok(python::list_of(state, value)?.pop().unwrap_or(Value::UNDEFINED))
    });
    env.add_filter("reverse", |state: &State, value: &Value| {
        iterable(value)?;
        if let Some(s) = value.as_str() {
            return Ok(Value::from(s.chars().rev().collect::<String>()));
        }
        let mut items = python::list_of(state, value)?;
        items.reverse();
        Ok(Value::from(items))
    });
    env.add_filter("items", |state: &State, value: &Value| {
        if value.is_undefined() {
            return Ok(Value::from(Vec::<Value>::new()));
        }
        if value.kind() != ValueKind::Map {
            return Err(type_error("items wants a mapping"));
        }
        methods::call(state, value, "items", &[])
    });
    env.add_filter("dictsort", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["case_sensitive", "by", "reverse"])?;
        let (case, by, reverse) = (args.flag(0, false), args.take(1), args.flag(2, false));
        let by_value = match by.as_ref().map(|v| v.as_str()) {
            None | Some(Some("key")) => false,
            Some(Some("value")) => true,
            _ => return Err(type_error("dictsort sorts by key or value")),
        };
        let object = value.as_object().filter(|o| o.repr() == ObjectRepr::Map).ok_or_else(|| type_error("dictsort wants a dict"))?;
        let mut keyed = Vec::new();
        for (k, v) in object.try_iter_pairs().into_iter().flatten() {
            let key = fold(if by_value { v.clone() } else { k.clone() }, case);
            python::shallow(&key)?;
            keyed.push((key, Value::from(Tuple::from([k, v]))));
        }
        sorted(state, keyed, reverse).map(Value::from)
    });
    env.add_filter("sort", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["reverse", "case_sensitive", "attribute"])?;
        let (reverse, case, attribute) = (args.flag(0, false), args.flag(1, false), args.take(2).filter(|v| !v.is_none()));
        iterable(value)?;
        let mut keyed = Vec::new();
        for item in python::list_of(state, value)? {
            keyed.push((sort_key(&item, attribute.as_ref(), case)?, item));
        }
        sorted(state, keyed, reverse).map(Value::from)
    });
    env.add_filter("min", |state: &State, value: &Value, args: Rest| extreme(state, value, &args, std::cmp::Ordering::Less));
    env.add_filter("max", |state: &State, value: &Value, args: Rest| extreme(state, value, &args, std::cmp::Ordering::Greater));
    env.add_filter("sum", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["attribute", "start"])?;
        let (attribute, start) = (args.take(0).filter(|v| !v.is_none()), args.take(1));
        let mut sum = start.unwrap_or_else(|| Value::from(0));
        for item in python::list_of(state, value)? {
            let item = match &attribute {
                Some(path) => lookup(&item, path)?,
                None => item,
            };
            sum = python::add(state, &sum, &item)?;
        }
        Ok::<_, Error>(sum)
    });
    env.add_filter("batch", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["linecount", "fill_with"])?;
        let (size, fill) = (args.int(0, 0)?, args.take(1).filter(|v| !v.is_none()));
        let size = usize::try_from(size).ok().filter(|n| *n > 0).ok_or_else(|| type_error("batch wants a size"))?;
        let items = python::list_of(state, value)?;
        let mut out = Vec::new();
        for chunk in items.chunks(size) {
            let mut chunk = chunk.to_vec();
            if let Some(fill) = &fill {
                budget::check(size.saturating_mul(std::mem::size_of::<Value>()))?;
                state.consume_fuel((size - chunk.len()) as u64)?;
                chunk.resize(size, fill.clone());
            }
            out.push(Value::from(chunk));
        }
        Ok(Value::from(out))
    });
    env.add_filter("unique", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["case_sensitive", "attribute"])?;
        let (case, attribute) = (args.flag(0, false), args.take(1).filter(|v| !v.is_none()));
        let mut seen = std::collections::HashSet::new();
        let mut out = Vec::new();
        for item in python::list_of(state, value)? {
            if seen.insert(sort_key(&item, attribute.as_ref(), case)?) {
                out.push(item);
            }
        }
        Ok(Value::from(out))
    });
    env.add_filter("groupby", |state: &State, value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["attribute", "default", "case_sensitive"])?;
        let (attribute, default, case) = (args.need(0)?, args.take(1), args.flag(2, false));
        let mut keyed = Vec::new();
        for item in python::list_of(state, value)? {
            let mut key = lookup(&item, &attribute)?;
            if key.is_undefined() {
                key = default.clone().unwrap_or(key);
            }
            python::shallow(&key)?;
            keyed.push((fold(key.clone(), case), Value::from(vec![key, item])));
        }
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        let n = keyed.len() as u64;
        state.consume_fuel(n * u64::from(64 - n.leading_zeros()))?;
        keyed.sort_by(|a, b| a.0.cmp(&b.0));
        for (folded, pair) in keyed {
            let (key, item) = (pair.get_item_by_index(0)?, pair.get_item_by_index(1)?);
            match groups.last_mut() {
                Some((last, _, items)) if *last == folded => items.push(item),
                _ => groups.push((folded, key, vec![item])),
            }
        }
        Ok(Value::from(
            groups
                .into_iter()
                .map(|(_, grouper, list)| Value::from_object(Group { grouper, list: Value::from(list) }))
                .collect::<Vec<_>>(),
        ))
    });
    env.add_filter("attr", |value: &Value, name: &Value| {
        let name = name.as_str().ok_or_else(|| type_error("attr wants a name"))?;
        // Attributes only: the items of a dict are none.
        match value.kind() {
            ValueKind::Map | ValueKind::String | ValueKind::Seq => {
                let found = methods::attr(value, name)?;
                Ok(if python::downcast::<methods::Bound>(&found).is_some() || python::downcast::<json::Dict>(value).is_none() {
                    found
                } else {
                    Value::UNDEFINED
                })
            }
            ValueKind::Undefined => Err(Error::from(ErrorKind::UndefinedError)),
            _ => Ok(value.get_attr(name).unwrap_or(Value::UNDEFINED)),
        }
    });
    env.add_filter("map", |state: &mut State, value: &Value, args: Rest| map(state, value, &args));
    env.add_filter("select", |state: &mut State, value: &Value, args: Rest| select(state, value, &args, false, true));
    env.add_filter("reject", |state: &mut State, value: &Value, args: Rest| select(state, value, &args, false, false));
    env.add_filter("selectattr", |state: &mut State, value: &Value, args: Rest| select(state, value, &args, true, true));
    env.add_filter("rejectattr", |state: &mut State, value: &Value, args: Rest| select(state, value, &args, true, false));
    env.add_filter("default", |value: &Value, args: Rest| default(value, &args));
    env.add_filter("d", |value: &Value, args: Rest| default(value, &args));
}

/// `min` and `max`.
fn extreme(state: &State, value: &Value, args: &[Value], wanted: std::cmp::Ordering) -> Result<Value, Error> {
    let mut args = Args::new(args, &["case_sensitive", "attribute"])?;
    let (case, attribute) = (args.flag(0, false), args.take(1).filter(|v| !v.is_none()));
    let mut best: Option<(Value, Value)> = None;
    for item in python::list_of(state, value)? {
        let key = sort_key(&item, attribute.as_ref(), case)?;
        if best.as_ref().is_none_or(|(old, _)| key.cmp(old) == wanted) {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |x| x.1))
}

/// One group of `groupby`: a pair that also has names.
#[derive(Debug)]
pub struct Group {
    grouper: Value,
    list: Value,
}

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_usize(), key.as_str()) {
            (Some(0), _) | (_, Some("grouper")) => Some(self.grouper.clone()),
            (Some(1), _) | (_, Some("list")) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> minijinja::value::Enumerator {
        minijinja::value::Enumerator::Seq(2)
    }
}

fn default(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let mut args = Args::new(args, &["default_value", "boolean"])?;
    let fallback = args.take(0).unwrap_or_else(|| Value::from(""));
    let boolean = args.flag(1, false);
    Ok(if value.is_undefined() || (boolean && !value.is_true()) { fallback } else { value.clone() })
}

fn map(state: &mut State, value: &Value, args: &[Value]) -> Result<Value, Error> {
    let items = python::list_of(state, value)?;
    let (pos, kwargs) = match args.split_last() {
        Some((last, pos)) if last.is_kwargs() => (pos, Some(Kwargs::try_from(last.clone())?)),
        _ => (args, None),
    };
    let mut out = Vec::with_capacity(items.len());
    if let Some(kwargs) = kwargs.as_ref().filter(|k| pos.is_empty() && k.has("attribute")) {
        let path = kwargs.get::<Value>("attribute")?;
        let fallback = if kwargs.has("default") { Some(kwargs.get::<Value>("default")?) } else { None };
        for item in items {
            let found = lookup(&item, &path)?;
            out.push(match &fallback {
                Some(v) if found.is_undefined() => v.clone(),
                _ => found,
            });
        }
        return Ok(Value::from(out));
    }
    let name = pos.first().and_then(|v| v.as_str()).ok_or_else(|| type_error("map wants a filter's name"))?;
    for item in items {
        budget::tick()?;
        let mut call = vec![item];
        call.extend(args[1..].iter().cloned());
        out.push(state.apply_filter(name, &call)?);
    }
    Ok(Value::from(out))
}

fn select(state: &mut State, value: &Value, args: &[Value], by_attr: bool, wanted: bool) -> Result<Value, Error> {
    let items = python::list_of(state, value)?;
    let (path, args) = match (by_attr, args.split_first()) {
        (true, Some((path, rest))) => (Some(path), rest),
        (true, None) => return Err(Error::from(ErrorKind::MissingArgument)),
        (false, _) => (None, args),
    };
    let test = match args.first() {
        Some(name) => Some(name.as_str().ok_or_else(|| type_error("a test's name must be a string"))?),
        None => None,
    };
    let mut out = Vec::new();
    for item in items {
        budget::tick()?;
        let subject = match path {
            Some(path) => lookup(&item, path)?,
            None => item.clone(),
        };
        let passed = match test {
            Some(name) => {
                let mut call = vec![subject];
                call.extend(args[1..].iter().cloned());
                state.perform_test(name, &call)?
            }
            None => subject.is_true(),
        };
        if passed == wanted {
            out.push(item);
        }
    }
    Ok(Value::from(out))
}

fn numbers(env: &mut Environment<'static>) {
    env.add_filter("int", |value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["default", "base"])?;
        let (fallback, base) = (args.take(0).unwrap_or_else(|| Value::from(0)), args.int(1, 10)?);
        Ok::<_, Error>(to_int(value, base).unwrap_or(fallback))
    });
    env.add_filter("float", |value: &Value, args: Rest| {
        let fallback = Args::new(&args, &["default"])?.take(0).unwrap_or_else(|| Value::from(0.0));
        let f = match value.as_str() {
            Some(s) => parse_float(s),
            None => python::to_float(value),
        };
        Ok::<_, Error>(f.map_or(fallback, Value::from))
    });
    env.add_filter("abs", |value: &Value| match (python::as_int(value), python::as_float(value)) {
        (Some(n), _) => n.checked_abs().map(|n| i64::try_from(n).map_or_else(|_| Value::from(n), Value::from)).ok_or_else(|| type_error("integer too large")),
        (_, Some(f)) => Ok(Value::from(f.abs())),
        _ => Err(type_error("abs wants a number")),
    });
    env.add_filter("round", |value: &Value, args: Rest| {
        let mut args = Args::new(&args, &["precision", "method"])?;
        let precision = args.int(0, 0)?.clamp(-300, 300) as i32;
        let method = args.string(1)?;
        let f = python::to_float(value).ok_or_else(|| type_error("round wants a number"))?;
        let scale = 10f64.powi(precision);
        Ok(match method.as_ref().and_then(|v| v.as_str()).unwrap_or("common") {
            // Python rounds halves to even, on the decimal text of the float. An integer stays one.
            "common" if value.is_integer() && precision >= 0 => value.clone(),
            "common" if precision >= 0 => Value::from(format!("{f:.*}", precision as usize).parse::<f64>().unwrap_or(f)),
            "common" => Value::from((f * scale).round_ties_even() / scale),
            "ceil" => Value::from((f * scale).ceil() / scale),
            "floor" => Value::from((f * scale).floor() / scale),
            _ => return Err(type_error("method must be common, ceil or floor")),
        })
    });
}

fn parse_float(s: &str) -> Option<f64> {
    let s = python::strip(s, true, true).replace('_', "");
    // Rust reads the same words as Python: inf, infinity, nan, in any case.
    s.parse().ok()
}

fn to_int(value: &Value, base: i64) -> Option<Value> {
    let small = |n: i128| i64::try_from(n).map_or_else(|_| Value::from(n), Value::from);
    if let Some(s) = value.as_str() {
        let s = python::strip(s, true, true).replace('_', "");
        let (sign, digits) = match s.strip_prefix('-') {
            Some(rest) => ("-", rest),
            None => ("", s.strip_prefix('+').unwrap_or(&s)),
        };
        let lower = digits.to_ascii_lowercase();
        let digits = match base {
            16 => lower.strip_prefix("0x").unwrap_or(&lower),
            8 => lower.strip_prefix("0o").unwrap_or(&lower),
            2 => lower.strip_prefix("0b").unwrap_or(&lower),
            _ => lower.as_str(),
        };
        let radix = u32::try_from(base).ok().filter(|r| (2..=36).contains(r))?;
        if let Ok(n) = i128::from_str_radix(&format!("{sign}{digits}"), radix) {
            return Some(small(n));
        }
        if base == 10 && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            let digits = digits.trim_start_matches('0');
            return Some(json::int_value(&format!("{sign}{digits}")));
        }
        // Jinja tries the text as a float next.
        let f = parse_float(&s)?;
        return f.is_finite().then(|| small(f.trunc() as i128));
    }
    if value.downcast_object_ref::<BigInt>().is_some() {
        return Some(value.clone());
    }
    if let Some(n) = python::as_int(value) {
        return Some(small(n));
    }
    let f = python::as_float(value)?;
    f.is_finite().then(|| small(f.trunc() as i128))
}

fn callable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Plain => value.downcast_object_ref::<BigInt>().is_none(),
        _ => false,
    }
}

fn tests(env: &mut Environment<'static>) {
    // A sequence is what has a length and items: strings and dicts too, and what is undefined.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable | ValueKind::Undefined)
    });
    env.add_test("iterable", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable | ValueKind::Undefined)
    });
    // A namespace is no mapping to Python.
    env.add_test("mapping", methods::is_plain_dict);
    env.add_test("string", |value: &Value| value.kind() == ValueKind::String);
    env.add_test("boolean", |value: &Value| value.kind() == ValueKind::Bool);
    env.add_test("number", |value: &Value| is_number(value) || value.kind() == ValueKind::Bool);
    env.add_test("integer", |value: &Value| is_number(value) && python::as_float(value).is_none());
    env.add_test("float", |value: &Value| python::as_float(value).is_some());
    env.add_test("callable", |value: &Value| callable(value));
    env.add_test("lower", |value: &Value| with_text(value, |s| s.chars().any(char::is_lowercase) && !s.chars().any(char::is_uppercase)));
    env.add_test("upper", |value: &Value| with_text(value, |s| s.chars().any(char::is_uppercase) && !s.chars().any(char::is_lowercase)));
    for name in ["eq", "equalto", "=="] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a == b));
    }
    for name in ["ne", "!="] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a != b));
    }
    for name in ["lt", "lessthan", "<"] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a < b));
    }
    for name in ["le", "<="] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a <= b));
    }
    for name in ["gt", "greaterthan", ">"] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a > b));
    }
    for name in ["ge", ">="] {
        env.add_test(name, |a: &Value, b: &Value| python::shallow(b).map(|()| a >= b));
    }
    env.add_test("in", |value: &Value, container: &Value| contains(value, container));
    env.add_test("escaped", |_: &Value| false);
    env.add_test("true", |value: &Value| value.kind() == ValueKind::Bool && value.is_true());
    env.add_test("false", |value: &Value| value.kind() == ValueKind::Bool && !value.is_true());
}

/// `value in container`.
fn contains(value: &Value, container: &Value) -> Result<bool, Error> {
    python::shallow(value)?;
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match value.as_str() {
            Some(part) => Ok(container.as_str().unwrap_or_default().contains(part)),
            None => Err(type_error("'in <string>' requires string as left operand")),
        },
        ValueKind::Map => {
            python::hashable(value)?;
            Ok(container.as_object().is_some_and(|o| o.get_value(value).is_some()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in container.try_iter()?.checked() {
                if item? == *value {
                    return Ok(true);
                }
                budget::tick()?;
            }
            Ok(false)
        }
        _ => Err(type_error("argument is not iterable")),
    }
}

fn is_number(value: &Value) -> bool {
    value.kind() == ValueKind::Number || value.downcast_object_ref::<BigInt>().is_some()
}

fn functions(env: &mut Environment<'static>) {
    env.add_function("raise_exception", |message: &Value, shown: Option<&str>| -> Result<Value, Error> {
        let _ = message;
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Fault::Raised(shown.unwrap_or_default().to_string())))
    });
    env.add_function("strftime_now", |state: &State, format: &str| clock::strftime_now(state, format));
    // A namespace nests values too.
    let namespace = env.globals().find(|(name, _)| *name == "namespace").map(|x| x.1);
    if let Some(namespace) = namespace {
        env.add_function("namespace", move |state: &mut State, args: Rest| {
            state.consume_fuel(python::NESTING_FUEL)?;
            namespace.call(state, &args)
        });
    }
    env.add_function("dict", |state: &State, args: Rest| -> Result<Value, Error> {
        state.consume_fuel(python::NESTING_FUEL)?;
        let (pos, kwargs) = match args.split_last() {
            Some((last, pos)) if last.is_kwargs() => (pos, Some(Kwargs::try_from(last.clone())?)),
            _ => (&args[..], None),
        };
        let mut pairs: Vec<(Value, Value)> = Vec::new();
        if let Some(source) = pos.first() {
            match source.as_object().filter(|o| o.repr() == ObjectRepr::Map) {
                Some(object) => pairs.extend(object.try_iter_pairs().into_iter().flatten()),
                None => {
                    for pair in python::list_of(state, source)? {
                        let pair = python::list_of(state, &pair)?;
                        let [k, v] = pair.as_slice() else { return Err(type_error("dict wants pairs")) };
                        pairs.push((k.clone(), v.clone()));
                    }
                }
            }
        }
        if let Some(kwargs) = kwargs {
            for name in kwargs.args() {
                pairs.push((Value::from(name), kwargs.get::<Value>(name)?));
            }
        }
        for (key, _) in &pairs {
            python::hashable(key)?;
        }
        Ok(Value::from_pairs(pairs))
    });
    env.add_function("joiner", |separator: Option<&str>| {
        Value::from_object(Joiner { separator: separator.unwrap_or(", ").into(), used: AtomicUsize::new(0) })
    });
    env.add_function("cycler", |state: &State, items: Rest| -> Result<Value, Error> {
        state.consume_fuel(python::NESTING_FUEL)?;
        if items.is_empty() {
            return Err(type_error("cycler wants at least one item"));
        }
        Ok(Value::from_object(Cycler { items: items.to_vec(), pos: AtomicUsize::new(0) }))
    });
}

#[derive(Debug)]
struct Joiner {
    separator: Value,
    used: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _state: &mut State<'_, '_>, _args: &[Value]) -> Result<Value, Error> {
        Ok(if self.used.swap(1, Ordering::Relaxed) == 0 { Value::from("") } else { self.separator.clone() })
    }
}

#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    pos: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.items[self.pos.load(Ordering::Relaxed) % self.items.len()].clone())
    }

    fn call_method(self: &Arc<Self>, _state: &mut State<'_, '_>, method: &str, _args: &[Value]) -> Result<Value, Error> {
        match method {
            "next" => Ok(self.items[self.pos.fetch_add(1, Ordering::Relaxed) % self.items.len()].clone()),
            "reset" => {
                self.pos.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Whether a filter gives a string, and never a safe one, whatever it is applied to.
pub fn returns_string(filter: &str) -> bool {
    matches!(
        filter,
        "tojson" | "title"
            | "replace" | "join" | "center" | "striptags" | CONCAT
    )
}
