//! From a chat request to the variables of its template: what vLLM does to messages, tools and arguments before it renders.

use std::sync::Arc;

use minijinja::{value::ValueKind, Value};

use super::{
    budget,
    json::{self, Dict, JsonError},
    Failure,
};

/// A chat request's parts as they stand in its body, and what the request says of them. An empty text is an absent part.
#[derive(Default)]
pub struct Request<'a> {
    pub messages: &'a [u8],
    pub tools: &'a [u8],
    pub documents: &'a [u8],
    pub kwargs: &'a [u8],
    pub reasoning_effort: &'a [u8],
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
}

/// How the template wants a message's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContentFormat {
    /// One text.
    Text,
    /// A list of parts.
    Parts,
}

/// A part of a message that is not text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Medium {
    pub message: usize,
    pub part: usize,
    pub kind: MediumKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MediumKind {
    Image = 0,
    Audio = 1,
    Video = 2,
}

impl MediumKind {
    fn name(self) -> &'static str {
        match self {
            MediumKind::Image => "image",
            MediumKind::Audio => "audio",
            MediumKind::Video => "video",
        }
    }
}

/// Placeholders that the model's processor wants in front of a text, for templates that take texts. Empty: not known.
#[derive(Clone, Default)]
pub struct Placeholders {
    pub image: String,
    pub audio: String,
    pub video: String,
}

impl Placeholders {
    fn of(&self, kind: MediumKind) -> &str {
        match kind {
            MediumKind::Image => &self.image,
            MediumKind::Audio => &self.audio,
            MediumKind::Video => &self.video,
        }
    }
}

/// What of the template preparation depends on.
pub struct Rules<'a> {
    pub format: ContentFormat,
    pub knows_developer: bool,
    pub placeholders: &'a Placeholders,
    /// Stands in for media, so that a second render shows where they are: the medium's number and this text around it.
    pub marker: Option<&'a str>,
}

impl From<JsonError> for Failure {
    fn from(err: JsonError) -> Failure {
        match err {
            JsonError::Syntax => Failure::invalid(err.text()),
            JsonError::TooDeep | JsonError::LoneSurrogate | JsonError::NotUtf8 => Failure::unsupported(err.text()),
            JsonError::OutOfTime => Failure::limit(err.text()),
        }
    }
}

/// The request's tools as vLLM hands them on; none where it has none.
pub fn tools(text: &[u8]) -> Result<Value, Failure> {
    if text.is_empty() {
        return Ok(Value::from(()));
    }
    let tools = json::parse(text)?;
    if tools.is_none() {
        return Ok(tools);
    }
    if tools.kind() != ValueKind::Seq {
        return Err(Failure::invalid("tools is not a list"));
    }
    let mut out = Vec::new();
    for tool in tools.try_iter().into_iter().flatten() {
        let tool = dict(&tool).ok_or_else(|| Failure::invalid("a tool is not an object"))?;
        let function = tool
            .get("function")
            .and_then(dict)
            .ok_or_else(|| Failure::invalid("a tool has no function"))?;
        if function.get("name").is_none_or(|name| name.as_str().is_none()) {
            return Err(Failure::invalid("a tool's function has no name"));
        }
        let mut f = Dict::new();
        for key in ["name", "description", "parameters"] {
            f.push(key, function.get(key).cloned().unwrap_or_else(|| Value::from(())));
        }
        // These two appear only where they are given; what vLLM's schema does not know is dropped.
        let defer = tool.some("defer_loading");
        if let Some(strict) = function.some("strict") {
            f.push("strict", strict.clone());
        }
        if let Some(defer) = function.some("defer_loading").or(defer) {
            f.push("defer_loading", defer.clone());
        }
        let mut t = Dict::new();
        t.push("type", tool.get("type").cloned().unwrap_or_else(|| Value::from("function")));
        t.push("function", Value::from_object(f));
        if let Some(defer) = defer {
            t.push("defer_loading", defer.clone());
        }
        out.push(Value::from_object(t));
    }
    Ok(Value::from(out))
}

fn dict(value: &Value) -> Option<&Dict> {
    value.downcast_object_ref::<Dict>()
}

/// Reads the messages of a request.
pub fn read_messages(text: &[u8]) -> Result<Vec<Value>, Failure> {
    if text.is_empty() {
        return Err(Failure::invalid("the request has no messages"));
    }
    let messages = json::parse(text)?;
    if messages.kind() != ValueKind::Seq {
        return Err(Failure::invalid("messages is not a list"));
    }
    Ok(messages.try_iter().into_iter().flatten().collect())
}

/// The conversation that vLLM makes of a request's messages, and the media in it.
pub fn conversation(messages: &[Value], rules: &Rules<'_>) -> Result<(Vec<Value>, Vec<Medium>), Failure> {
    let mut media = Vec::new();
    let mut out = Vec::with_capacity(messages.len());
    for (i, message) in messages.iter().enumerate() {
        budget::tick()?;
        let message = dict(message).ok_or_else(|| Failure::invalid("a message is not an object"))?;
        out.push(convert(i, message, rules, &mut media)?);
    }
    if !rules.knows_developer && out.iter().any(|m| role(m) == "developer") {
        out = fold_developer(out);
    }
    Ok((out.into_iter().map(Value::from_object).collect(), media))
}

fn role(message: &Dict) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

/// For a template that does not know developers they are the system, and all that the system says becomes one message in
/// front, unless it is one there already.
fn fold_developer(mut messages: Vec<Dict>) -> Vec<Dict> {
    for message in &mut messages {
        if role(message) == "developer" {
            message.set("role", Value::from("system"));
            message.remove("tools");
        }
    }
    let is_system = |message: &Dict| role(message) == "system";
    if messages.iter().skip(1).all(|m| !is_system(m)) {
        return messages;
    }
    let texts: Vec<String> = messages.iter().filter(|m| is_system(m)).map(content_text).filter(|t| !t.is_empty()).collect();
    let mut merged = Dict::new();
    merged.push("role", Value::from("system"));
    merged.push("content", Value::from(texts.join("\n\n")));
    let rest = messages.into_iter().filter(|m| !is_system(m));
    std::iter::once(merged).chain(rest).collect()
}

/// A message's content as one text: its parts' texts on lines.
fn content_text(message: &Dict) -> String {
    let Some(content) = message.get("content") else { return String::new() };
    if let Some(text) = content.as_str() {
        return text.to_string();
    }
    let mut texts = Vec::new();
    for part in content.try_iter().into_iter().flatten() {
        if let Some(text) = dict(&part).and_then(|p| p.get("text")).unwrap_or(&part).as_str() {
            texts.push(text.to_string());
        }
    }
    texts.join("\n")
}

/// A line that a client of another API puts in front of its system text, another one at each request. vLLM drops it, as
/// no prefix could be shared behind it.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// A system text without that line; none if nothing is left.
fn without_billing_header(text: &str) -> Option<&str> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    text.split_once('\n').map(|x| x.1).filter(|rest| !rest.is_empty())
}

fn convert(index: usize, message: &Dict, rules: &Rules<'_>, media: &mut Vec<Medium>) -> Result<Dict, Failure> {
    let role = message.get("role").and_then(Value::as_str).ok_or_else(|| Failure::invalid("a message has no role"))?;
    let mut out = Dict::new();
    out.push("role", Value::from(role));
    out.push("content", content(index, role == "system", message.some("content"), rules, media)?);
    match role {
        "assistant" => {
            if let Some(calls) = message.some("tool_calls") {
                let calls = tool_calls(calls)?;
                // A template must not take the message for one that calls tools.
                if !calls.is_empty() {
                    out.push("tool_calls", Value::from(calls));
                }
            }
            let reasoning = message.some("reasoning").or_else(|| message.some("reasoning_content"));
            if let Some(reasoning) = reasoning.filter(|r| r.as_str().is_some()) {
                out.push("reasoning", reasoning.clone());
                out.push("reasoning_content", reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id") {
                out.push("tool_call_id", id.clone());
            }
            flatten_tool_content(&mut out);
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(value) = message.get(key).filter(|v| v.as_str().is_some()) {
            out.push(key, value.clone());
        }
    }
    if role == "developer" {
        out.push("tools", message.some("tools").map_or_else(|| Value::from(()), developer_tools));
    }
    Ok(out)
}

/// The tools of a developer's message: its keys in the order of vLLM's schema, those that are there.
fn developer_tools(tools: &Value) -> Value {
    let pick = |from: &Dict, keys: &[&str]| {
        let mut out = Dict::new();
        for key in keys {
            if let Some(value) = from.get(key) {
                out.push(key, value.clone());
            }
        }
        out
    };
    let mut out = Vec::new();
    for tool in tools.try_iter().into_iter().flatten() {
        let Some(tool) = dict(&tool) else { continue };
        let mut picked = pick(tool, &["function", "type"]);
        if let Some(function) = tool.get("function").and_then(dict) {
            let function = pick(function, &["name", "description", "parameters", "strict"]);
            picked.set("function", Value::from_object(function));
        }
        out.push(Value::from_object(picked));
    }
    Value::from(out)
}

/// What a tool said is one text, for templates that take parts too, unless it holds more than text.
fn flatten_tool_content(message: &mut Dict) {
    let Some(parts) = message.get("content").filter(|c| c.kind() == ValueKind::Seq) else { return };
    let mut texts = Vec::new();
    for part in parts.try_iter().into_iter().flatten() {
        let Some(part) = dict(&part) else { return };
        if part.get("type").and_then(Value::as_str) != Some("text") {
            return;
        }
        texts.push(part.get("text").and_then(Value::as_str).unwrap_or_default().to_string());
    }
    message.set("content", Value::from(texts.join("\n")));
}

fn tool_calls(calls: &Value) -> Result<Vec<Value>, Failure> {
    if calls.kind() != ValueKind::Seq {
        return Err(Failure::invalid("tool_calls is not a list"));
    }
    let mut out = Vec::new();
    for call in calls.try_iter().into_iter().flatten() {
        let call = dict(&call).ok_or_else(|| Failure::invalid("a tool call is not an object"))?;
        let function = call.get("function").and_then(dict);
        let kind = call.get("type").map(|t| t.as_str().unwrap_or_default());
        let (Some(function), None | Some("function")) = (function, kind) else {
            return Err(Failure::invalid("a tool call is not a function's"));
        };
        let mut f = Dict::new();
        f.push("arguments", arguments(function.get("arguments"))?);
        if let Some(name) = function.get("name") {
            f.push("name", name.clone());
        }
        // The order in which vLLM's schema has the keys.
        let mut c = Dict::new();
        if let Some(id) = call.get("id") {
            c.push("id", id.clone());
        }
        c.push("function", Value::from_object(f));
        if let Some(kind) = call.get("type") {
            c.push("type", kind.clone());
        }
        out.push(Value::from_object(c));
    }
    Ok(out)
}

fn arguments(value: Option<&Value>) -> Result<Value, Failure> {
    let empty = || Value::from_object(Dict::new());
    let Some(value) = value else { return Ok(empty()) };
    if dict(value).is_some() {
        return Ok(value.clone());
    }
    let Some(text) = value.as_str() else { return Ok(empty()) };
    match json::parse(text.as_bytes()) {
        Ok(parsed) if dict(&parsed).is_some() => Ok(parsed),
        Ok(_) | Err(JsonError::Syntax) => Ok(empty()),
        Err(err) => Err(err.into()),
    }
}

fn text_part(text: &str) -> Value {
    let mut part = Dict::new();
    part.push("type", Value::from("text"));
    part.push("text", Value::from(text));
    Value::from_object(part)
}

fn content(index: usize, system: bool, content: Option<&Value>, rules: &Rules<'_>, media: &mut Vec<Medium>) -> Result<Value, Failure> {
    let parts_wanted = rules.format == ContentFormat::Parts;
    let Some(content) = content else {
        return Ok(if parts_wanted { Value::from(Vec::<Value>::new()) } else { Value::from("") });
    };
    if let Some(text) = content.as_str() {
        let text = match without_billing_header(text) {
            Some(rest) if system && rest.len() < text.len() => Value::from(rest),
            None if system => return Ok(if parts_wanted { Value::from(Vec::<Value>::new()) } else { Value::from("") }),
            _ => content.clone(),
        };
        if !parts_wanted {
            return Ok(text);
        }
        let mut part = Dict::new();
        part.push("type", Value::from("text"));
        part.push("text", text);
        return Ok(Value::from(vec![Value::from_object(part)]));
    }
    if content.kind() != ValueKind::Seq {
        return Err(Failure::invalid("a message's content is neither text nor a list"));
    }
    let mut parts = Vec::new();
    let mut texts: Vec<Arc<str>> = Vec::new();
    let mut here = Vec::new();
    for (i, part) in content.try_iter().into_iter().flatten().enumerate() {
        budget::tick()?;
        let mut read = read_part(&part)?;
        if let (true, Part::Text(text)) = (system, &read) {
            // Only texts that the request itself calls so.
            let plain = dict(&part).is_none_or(|p| p.get("type").and_then(Value::as_str) == Some("text"));
            read = match without_billing_header(text) {
                Some(rest) if plain && rest.len() < text.len() => Part::Text(rest.into()),
                None if plain => Part::Skip,
                _ => read,
            };
        }
        match read {
            Part::Skip => {}
            Part::Text(text) if parts_wanted => parts.push(text_part(&text)),
            Part::Text(text) => {
                if !text.is_empty() {
                    texts.push(text);
                }
            }
            Part::ToolReference(name) if parts_wanted => {
                let mut part = Dict::new();
                part.push("type", Value::from("tool_reference"));
                part.push("name", name);
                parts.push(Value::from_object(part));
            }
            Part::ToolReference(name) => texts.extend(name.to_str().filter(|s| !s.is_empty())),
            Part::Medium(kind) => {
                here.push(kind);
                if parts_wanted {
                    let part = match rules.marker {
                        Some(marker) => text_part(&format!("{marker}{}{marker}", media.len())),
                        None => {
                            let mut part = Dict::new();
                            part.push("type", Value::from(kind.name()));
                            Value::from_object(part)
                        }
                    };
                    parts.push(part);
                }
                media.push(Medium { message: index, part: i, kind });
            }
        }
    }
    if parts_wanted {
        return Ok(Value::from(parts));
    }
    let mut text = texts.join("\n");
    if !here.is_empty() {
        text = with_placeholders(text, &here, media, rules)?;
    }
    Ok(Value::from(text))
}

/// A text with the placeholders of its media: those that it does not hold itself come first, each on a line.
fn with_placeholders(text: String, here: &[MediumKind], media: &[Medium], rules: &Rules<'_>) -> Result<String, Failure> {
    let first = media.len() - here.len();
    let mut lines: Vec<String> = Vec::new();
    for kind in [MediumKind::Image, MediumKind::Audio, MediumKind::Video] {
        let numbers: Vec<usize> = here.iter().enumerate().filter(|(_, k)| **k == kind).map(|(i, _)| first + i).collect();
        if numbers.is_empty() {
            continue;
        }
        let placeholder = rules.placeholders.of(kind);
        if placeholder.is_empty() {
            return Err(Failure::unsupported(
                "the request has images, audio or video, and where its template wants them is not known",
            ));
        }
        let present = text.matches(placeholder).count();
        if present > numbers.len() {
            return Err(Failure::invalid("the text has more placeholders than the message has media"));
        }
        for number in &numbers[present..] {
            lines.push(match rules.marker {
                Some(marker) => format!("{marker}{number}{marker}"),
                None => placeholder.to_string(),
            });
        }
    }
    if !text.is_empty() {
        lines.push(text);
    }
    Ok(lines.join("\n"))
}

enum Part {
    Skip,
    Text(Arc<str>),
    Medium(MediumKind),
    ToolReference(Value),
}

fn read_part(part: &Value) -> Result<Part, Failure> {
    if let Some(text) = part.to_str() {
        return Ok(Part::Text(text));
    }
    let part = dict(part).ok_or_else(|| Failure::invalid("a content part is neither text nor an object"))?;
    let has_uuid = part.some("uuid").is_some();
    let kind = match part.get("type") {
        Some(kind) => Some(kind.as_str().ok_or_else(|| Failure::invalid("a content part's type is not text"))?),
        None => None,
    };
    let text = |key: &str| -> Result<Part, Failure> {
        match part.some(key) {
            None => Ok(Part::Skip),
            Some(value) => value.to_str().map(Part::Text).ok_or_else(|| Failure::invalid("a text part holds no text")),
        }
    };
    if let (Some(kind), false) = (kind, has_uuid) {
        return match kind {
            "text" | "input_text" | "output_text" => text("text"),
            "refusal" => text("refusal"),
            "thinking" => text("thinking"),
            "image_url" | "input_image" | "image_pil" | "image_embeds" => Ok(Part::Medium(MediumKind::Image)),
            "audio_url" | "input_audio" | "audio_embeds" => Ok(Part::Medium(MediumKind::Audio)),
            "video_url" | "video_embeds" => Ok(Part::Medium(MediumKind::Video)),
            "tool_reference" => Ok(Part::ToolReference(part.get("name").cloned().unwrap_or_else(|| Value::from(())))),
            "prompt_embeds" => Err(Failure::unsupported("the request has embeddings in place of text")),
            _ => Err(Failure::invalid("a content part is of an unknown type")),
        };
    }
    // Without a type, or with an identifier of the client's, the part's key says what it is.
    for (key, medium) in [
        ("image_url", MediumKind::Image),
        ("image_pil", MediumKind::Image),
        ("image_embeds", MediumKind::Image),
        ("audio_embeds", MediumKind::Audio),
        ("video_embeds", MediumKind::Video),
        ("audio_url", MediumKind::Audio),
        ("input_audio", MediumKind::Audio),
        ("video_url", MediumKind::Video),
    ] {
        if part.get(key).is_some() {
            return Ok(Part::Medium(medium));
        }
    }
    Err(Failure::invalid("a content part has no type"))
}

/// The variables beside messages and tools. `known` tells whether the template reads a variable.
pub fn arguments_of(request: &Request<'_>, known: impl Fn(&str) -> bool, out: &mut Dict) -> Result<(), Failure> {
    let kwargs = if request.kwargs.is_empty() { Value::from(()) } else { json::parse(request.kwargs)? };
    let kwargs = match (dict(&kwargs), kwargs.is_none()) {
        (Some(kwargs), _) => Some(kwargs),
        (None, true) => None,
        (None, false) => return Err(Failure::invalid("chat_template_kwargs is not an object")),
    };
    let given = |key: &str| kwargs.and_then(|k| k.get(key));
    for (key, value) in kwargs.into_iter().flat_map(|k| k.iter()) {
        match key {
            "chat_template" | "tokenize" => return Err(Failure::invalid("chat_template_kwargs holds what it may not")),
            "messages" | "conversation" => return Err(Failure::invalid("chat_template_kwargs holds the conversation")),
            "tools" | "add_generation_prompt" | "continue_final_message" => {}
            _ if key == "documents" || known(key) => out.set(key, value.clone()),
            _ => {}
        }
    }
    // The request's own fields win where they are given.
    if !request.documents.is_empty() {
        let documents = json::parse(request.documents)?;
        if !documents.is_none() {
            out.set("documents", documents);
        }
    }
    if !request.reasoning_effort.is_empty() {
        let effort = json::parse(request.reasoning_effort)?;
        if !effort.is_none() {
            if known("reasoning_effort") && effort.as_str() != Some("auto") {
                out.set("reasoning_effort", effort.clone());
            }
            if known("enable_thinking") && given("enable_thinking").is_none() {
                out.set("enable_thinking", Value::from(effort.as_str() != Some("none")));
            }
        }
    }
    Ok(())
}

/// Marks the end of the message that a render is to stop after. A template that trims the message trims the space too.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Puts the mark behind the last message's text. Gives the text without it.
pub fn tag_final(messages: &mut [Value]) -> Result<Arc<str>, Failure> {
    let refuse = || Failure::invalid("continue_final_message is set and the last message has no text to continue");
    let last = messages.last_mut().ok_or_else(refuse)?;
    let mut message = dict(last).ok_or_else(refuse)?.copy();
    let content = message.get("content").cloned().ok_or_else(refuse)?;
    if let Some(text) = content.to_str() {
        // A context that was taken down behind transformers' own preparation has the mark already.
        if let Some(text) = text.strip_suffix(TAG) {
            return Ok(text.into());
        }
        message.set("content", Value::from(format!("{text}{TAG}")));
        *last = Value::from_object(message);
        return Ok(text);
    }
    let mut parts: Vec<Value> = content.try_iter().map_err(|_| refuse())?.collect();
    for part in parts.iter_mut().rev() {
        let Some(text) = dict(part).and_then(|p| p.get("text")).and_then(Value::to_str) else { continue };
        if let Some(text) = text.strip_suffix(TAG) {
            return Ok(text.into());
        }
        let Some(mut copy) = dict(part).map(Dict::copy) else { continue };
        copy.set("text", Value::from(format!("{text}{TAG}")));
        *part = Value::from_object(copy);
        message.set("content", Value::from(parts));
        *last = Value::from_object(message);
        return Ok(text);
    }
    Err(refuse())
}

/// Cuts a rendered text behind the final message that [`tag_final`] marked.
pub fn cut_final(text: &mut String, message: &str) -> Result<(), Failure> {
    let missing = || Failure::refused("continue_final_message is set and the template does not print the last message");
    let message = super::python::strip(message, true, true);
    if !text.contains(message) {
        return Err(missing());
    }
    let at = text.rfind(TAG.trim_end()).ok_or_else(missing)?;
    let kept = text[at..].starts_with(TAG);
    text.truncate(at);
    if !kept {
        let len = super::python::strip(text, false, true).len();
        text.truncate(len);
    }
    Ok(())
}
