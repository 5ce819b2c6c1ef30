//! Chat templates: rendered byte for byte as transformers' `apply_chat_template` does, after vLLM's own preparation of the
//! request.
//!
//! minijinja parses and runs them. What it does differently from Jinja on Python is replaced: [`scan`] works on the source,
//! [`compile`] on the syntax tree, [`filters`], [`methods`] and [`python`] on values, [`json`] reads and writes numbers and
//! keys as Python does. [`prepare`] is vLLM's part. A render is bounded by fuel, output and time ([`budget`]), and runs on
//! a stack of its own ([`stack`]).
//!
//! Errors never quote the conversation: they carry texts of this crate, the template's line, and of a raised exception only
//! what stands in the template itself.

mod budget;
mod clock;
mod compile;
mod ffi;
mod filters;
mod json;
mod methods;
mod prepare;
mod python;
mod scan;
mod stack;

use std::{collections::BTreeMap, time::Duration};

use minijinja::{value::ValueKind, AutoEscape, Environment, Error, ErrorKind, Value};
use serde::Deserialize;

use compile::Program;
use json::Dict;
use prepare::{ContentFormat, Medium, Placeholders, Request, Rules};

/// What an error of minijinja's carries if it was made here.
#[derive(Debug)]
pub enum Fault {
    /// `raise_exception`, with the template's own words.
    Raised(String),
    TooBig,
    OutOfTime,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fault::Raised(_) => "raised",
            Fault::TooBig => "output too large",
            Fault::OutOfTime => "out of time",
        })
    }
}

impl std::error::Error for Fault {}

/// Outcome of a render. The numbers are part of include/prefixgate_render.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Status {
    Ok = 0,
    /// The template refuses the conversation: vLLM answers 400.
    Refused = 1,
    /// The template fails on the conversation: vLLM answers 400 too.
    Failed = 2,
    /// vLLM would render it, this renderer cannot.
    Unsupported = 3,
    /// vLLM refuses the request before the template sees it.
    Invalid = 4,
    /// Fuel, time or output ran out.
    Limit = 5,
    Panicked = 6,
}

/// Why there is no rendered text. `text` is safe to log.
#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    pub text: String,
}

impl Failure {
    fn new(status: Status, text: impl Into<String>) -> Failure {
        Failure { status, text: text.into() }
    }

    pub fn invalid(text: &str) -> Failure {
        Failure::new(Status::Invalid, text)
    }

    pub fn unsupported(text: &str) -> Failure {
        Failure::new(Status::Unsupported, text)
    }

    pub fn limit(text: &str) -> Failure {
        Failure::new(Status::Limit, text)
    }

    pub fn refused(text: &str) -> Failure {
        Failure::new(Status::Refused, text)
    }
}

impl From<Error> for Failure {
    fn from(err: Error) -> Failure {
        let at = match err.line() {
            Some(line) => format!(" at line {line} of the template"),
            None => String::new(),
        };
        let mut fault = None;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&err);
        while let Some(error) = cause {
            if let Some(found) = error.downcast_ref::<Fault>() {
                fault = Some(found);
            }
            cause = error.source();
        }
        match fault {
            Some(Fault::Raised(words)) if words.is_empty() => Failure::new(Status::Refused, format!("exception raised{at}")),
            Some(Fault::Raised(words)) => Failure::new(Status::Refused, format!("{words} (raised{at})")),
            Some(Fault::TooBig) => Failure::new(Status::Limit, format!("more output than allowed{at}")),
            Some(Fault::OutOfTime) => Failure::new(Status::Limit, format!("out of time{at}")),
            None if err.kind() == ErrorKind::OutOfFuel => Failure::new(Status::Limit, format!("out of fuel{at}")),
            // The kind only: the detail may quote values.
            None => Failure::new(Status::Failed, format!("{}{at}", err.kind())),
        }
    }
}

/// How a template is set up. Everything but the templates has a default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Sources by name; a single template is named "default".
    pub templates: BTreeMap<String, String>,
    /// Variables that every render gets: bos_token and its like, as JSON text.
    #[serde(default)]
    pub special_tokens: String,
    /// "string" or "openai"; else what the template itself tells.
    #[serde(default)]
    pub content_format: String,
    /// Arguments for templates that requests may override, as JSON text.
    #[serde(default)]
    pub default_kwargs: String,
    #[serde(default)]
    pub image_placeholder: String,
    #[serde(default)]
    pub audio_placeholder: String,
    #[serde(default)]
    pub video_placeholder: String,
    pub max_output_bytes: usize,
    pub max_fuel: u64,
    pub timeout_ms: u64,
}

/// One or more compiled templates of a model, shared by any number of threads.
pub struct Templates {
    programs: BTreeMap<String, Named>,
    special_tokens: Vec<(String, Value)>,
    default_kwargs: Vec<(String, Value)>,
    placeholders: Placeholders,
    max_output_bytes: usize,
    max_fuel: u64,
    timeout: Duration,
    env: Box<Environment<'static>>,
}

struct Named {
    program: Program,
    format: ContentFormat,
}

/// A rendered request.
pub struct Rendered {
    pub text: String,
    pub format: ContentFormat,
    pub media: Vec<Placed>,
    pub uses_clock: bool,
}

/// A medium and where the template put it: a range of the text, or none if that cannot be told.
pub struct Placed {
    pub medium: Medium,
    pub range: Option<(usize, usize)>,
}

/// Depth at which a template's recursion ends. Python ends it at about 300 nested macros.
const RECURSION: usize = 500;
/// What a render may do whatever its input.
const BASE_FUEL: u64 = 2_000_000;
/// And for each byte of input. Templates take up to 1 a byte for conversations of many tiny messages, and more where they
/// look through all messages for each one.
const FUEL_PER_BYTE: u64 = 16;

impl Templates {
    /// Compiles the templates. An error names the template and the line, and quotes nothing but the parser's message.
    pub fn new(config: &Config) -> Result<Templates, String> {
        let mut env = Environment::new();
        env.set_recursion_limit(RECURSION);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(|state, value, name, args| methods::call(state, value, name, args));
        env.set_formatter(|out, _state, value| {
            if let Some(s) = value.as_str() {
                budget::emit(s.len())?;
                return out.write_str(s).map_err(Error::from);
            }
            let text = python::to_string(value)?;
            budget::emit(text.len())?;
            out.write_str(&text).map_err(Error::from)
        });
        filters::register(&mut env);
        // minijinja's own, which Jinja has not.
        env.remove_global("debug");
        let mut programs = BTreeMap::new();
        for (name, source) in &config.templates {
            let program = compile::compile(source).map_err(|err| {
                let line = err.line().map(|n| format!(", line {n}")).unwrap_or_default();
                let detail = err.detail().unwrap_or("it does not parse");
                format!("chat template {name:?}{line}: {detail}")
            })?;
            let format = match config.content_format.as_str() {
                "string" => ContentFormat::Text,
                "openai" => ContentFormat::Parts,
                _ if program.facts.iterates_content => ContentFormat::Parts,
                _ => ContentFormat::Text,
            };
            programs.insert(name.clone(), Named { program, format });
        }
        if programs.is_empty() {
            return Err("no chat template".to_string());
        }
        Ok(Templates {
            programs,
            special_tokens: variables("special tokens", &config.special_tokens)?,
            default_kwargs: variables("default arguments", &config.default_kwargs)?,
            placeholders: Placeholders {
                image: config.image_placeholder.clone(),
                audio: config.audio_placeholder.clone(),
                video: config.video_placeholder.clone(),
            },
            max_output_bytes: config.max_output_bytes,
            max_fuel: config.max_fuel,
            timeout: Duration::from_millis(config.timeout_ms),
            env: Box::new(env),
        })
    }

    /// The template for a request with or without tools, as transformers chooses it.
    fn choose(&self, tools: bool) -> Result<&Named, Failure> {
        if tools {
            if let Some(named) = self.programs.get("tool_use") {
                return Ok(named);
            }
        }
        self.programs
            .get("default")
            .or_else(|| if self.programs.len() == 1 { self.programs.values().next() } else { None })
            .ok_or_else(|| Failure::unsupported("the model has several chat templates and none is the default"))
    }

    pub fn format(&self) -> ContentFormat {
        self.choose(false).map_or(ContentFormat::Text, |named| named.format)
    }

    /// The fuel for a render of so much input.
    pub fn fuel(&self, input_bytes: usize) -> u64 {
        BASE_FUEL.saturating_add((input_bytes as u64).saturating_mul(FUEL_PER_BYTE)).min(self.max_fuel)
    }

    /// Renders a chat request.
    pub fn render(&self, request: &Request<'_>, fuel: u64) -> Result<Rendered, Failure> {
        let add = request.add_generation_prompt.unwrap_or(true);
        let cut = request.continue_final_message.unwrap_or(false);
        if add && cut {
            return Err(Failure::invalid("continue_final_message and add_generation_prompt exclude each other"));
        }
        let _budget = budget::start(self.max_output_bytes, self.timeout);
        let tools = prepare::tools(request.tools)?;
        let named = self.choose(!tools.is_none())?;
        let facts = &named.program.facts;
        let messages = prepare::read_messages(request.messages)?;
        let mut rules = Rules {
            format: named.format,
            knows_developer: facts.knows_developer,
            placeholders: &self.placeholders,
            marker: None,
        };
        let (conversation, media) = prepare::conversation(&messages, &rules)?;
        let mut base = Dict::new();
        for (key, value) in &self.special_tokens {
            base.set(key, value.clone());
        }
        base.set("documents", Value::from(()));
        for (key, value) in &self.default_kwargs {
            if facts.variables.contains(key) {
                base.set(key, value.clone());
            }
        }
        prepare::arguments_of(request, |name| facts.variables.contains(name), &mut base)?;
        base.set("tools", tools);
        base.set("add_generation_prompt", Value::from(add));
        // transformers takes this one for itself.
        base.remove("continue_final_message");

        let text = self.run(named, base.copy(), conversation, cut, fuel)?;
        let mut out = Rendered { text, format: named.format, media: Vec::new(), uses_clock: facts.uses_clock };
        if !media.is_empty() {
            // A second render with marks in place of the media shows where the first one has them.
            let contains = |haystack: &[u8], needle: &[u8]| haystack.windows(needle.len()).any(|w| w == needle);
            let marked = if contains(request.messages, MARKER.as_bytes()) {
                None
            } else {
                rules.marker = Some(MARKER);
                let (conversation, _) = prepare::conversation(&messages, &rules)?;
                self.run(named, base, conversation, cut, fuel).ok()
            };
            let ranges = marked.and_then(|marked| align(&out.text, &marked, media.len()));
            out.media = media
                .into_iter()
                .enumerate()
                .map(|(i, medium)| Placed { medium, range: ranges.as_ref().map(|r| r[i]) })
                .collect();
        }
        Ok(out)
    }

    /// Renders variables as they are handed to a template: no preparation but continue_final_message.
    pub fn render_context(&self, context: &[u8], cut: bool, fuel: u64) -> Result<Rendered, Failure> {
        let _budget = budget::start(self.max_output_bytes, self.timeout);
        let context = json::parse(context)?;
        let context =
            context.downcast_object_ref::<Dict>().ok_or_else(|| Failure::invalid("the context is not an object"))?;
        let named = self.choose(context.some("tools").is_some())?;
        let mut base = Dict::new();
        for (key, value) in &self.special_tokens {
            base.set(key, value.clone());
        }
        for (key, value) in context.iter() {
            base.set(key, value.clone());
        }
        let messages = match context.get("messages") {
            Some(messages) if messages.kind() == ValueKind::Seq => messages.try_iter().into_iter().flatten().collect(),
            _ => Vec::new(),
        };
        let text = self.run(named, base, messages, cut, fuel)?;
        let uses_clock = named.program.facts.uses_clock;
        Ok(Rendered { text, format: named.format, media: Vec::new(), uses_clock })
    }

    fn run(&self, named: &Named, mut context: Dict, mut messages: Vec<Value>, cut: bool, fuel: u64) -> Result<String, Failure> {
        let last = if cut { Some(prepare::tag_final(&mut messages)?) } else { None };
        context.set("messages", Value::from(messages));
        let mut env = (*self.env).clone();
        env.set_fuel(Some(fuel));
        budget::output();
        let mut text = String::new();
        run_program(&env, &named.program, Value::from_object(context), &mut text)?;
        if text.len() > self.max_output_bytes {
            return Err(budget::too_big().into());
        }
        if let Some(last) = last {
            prepare::cut_final(&mut text, &last)?;
        }
        Ok(text)
    }
}

fn variables(what: &str, text: &str) -> Result<Vec<(String, Value)>, String> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let object = json::parse(text.as_bytes()).map_err(|err| format!("{what}: {}", err.text()))?;
    let object = object.downcast_object_ref::<Dict>().ok_or_else(|| format!("{what}: not an object"))?;
    Ok(object.iter().map(|(k, v)| (k.to_string(), v.clone())).collect())
}

/// Runs a program with an environment that lives as long as the call.
fn run_program(env: &Environment<'static>, program: &Program, context: Value, text: &mut String) -> Result<(), Error> {
    // SAFETY: minijinja wants one lifetime for the environment's borrow, its contents and the program. All of them outlive
    // this call, and nothing that borrows from them leaves it: the state is dropped below.
    let env: &'static Environment<'static> = unsafe { &*std::ptr::from_ref(env) };
    let program: &'static Program = unsafe { &*std::ptr::from_ref(program) };
    let mut out = minijinja::machinery::make_string_output(text);
    let state = minijinja::machinery::eval(env, &program.main, context, &program.blocks, &mut out, AutoEscape::None)?;
    drop(state);
    Ok(())
}

/// Around a medium's number in the second render: a character that no tokenizer's special tokens hold.
const MARKER: &str = "\u{F8FF}prefixgate\u{F8FF}";

/// Where the media of `text` are, given the same render with marks in their places.
fn align(text: &str, marked: &str, count: usize) -> Option<Vec<(usize, usize)>> {
    let mut ranges = vec![None; count];
    let mut rest = marked;
    let mut at = 0;
    // The first stretch is equal in both; each following one is searched behind the medium before it.
    let mut pending: Option<(usize, usize)> = None;
    loop {
        let next = rest.find(MARKER);
        let stretch = &rest[..next.unwrap_or(rest.len())];
        match pending.take() {
            None => {
                if !text[at..].starts_with(stretch) {
                    return None;
                }
                at += stretch.len();
            }
            Some((number, start)) => {
                let found = if next.is_none() {
                    text.len().checked_sub(stretch.len()).filter(|&i| i >= at && text[i..] == *stretch)
                } else {
                    // Two media side by side cannot be told apart.
                    if stretch.is_empty() {
                        return None;
                    }
                    text[at..].find(stretch).map(|i| at + i)
                }?;
                ranges[number] = Some((start, found));
                at = found + stretch.len();
            }
        }
        let Some(next) = next else { break };
        rest = &rest[next + MARKER.len()..];
        let end = rest.find(MARKER)?;
        let number: usize = rest[..end].parse().ok()?;
        if number >= count || ranges[number].is_some() {
            return None;
        }
        rest = &rest[end + MARKER.len()..];
        pending = Some((number, at));
    }
    ranges.into_iter().collect()
}
