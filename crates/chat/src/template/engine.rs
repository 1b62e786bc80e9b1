//! The template language: minijinja, set up to print what Python's Jinja prints.

use std::borrow::Cow;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value as Jinja, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use serde_json::{Map, Value};

use super::bounded::{self, BoundedProgram};
use super::limits::{self, OverLimit};
use super::value::from_json;
use super::{clock, filters, python, tojson};
use crate::error::ChatError;

/// Maximum number of steps of one rendering, those of the bounds included: over a thousand per
/// message of the longest request.
const FUEL: u64 = 40_000_000;
/// Deepest nesting of macros.
const MAX_DEPTH: usize = 200;

/// The variables of a template.
pub(super) struct RenderContext<'a> {
    pub(super) messages: &'a Value,
    pub(super) tools: &'a Value,
    pub(super) add_generation_prompt: bool,
    pub(super) further: &'a Map<String, Value>,
    pub(super) now_unix: i64,
}

impl RenderContext<'_> {
    /// Bytes of text in the variables, about.
    fn text_bytes(&self) -> usize {
        let further = self.further.values().map(text_bytes).sum::<usize>();
        text_bytes(self.messages) + text_bytes(self.tools) + further
    }
}

fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| 8 + text_bytes(item)).sum(),
        Value::Object(map) => {
            let sizes = map.iter().map(|(key, item)| key.len() + text_bytes(item));
            sizes.sum()
        }
        _ => 8,
    }
}

/// A compiled template.
#[derive(Debug)]
pub(super) struct CompiledTemplate {
    environment: Environment<'static>,
    program: BoundedProgram,
    source: String,
}

/// The message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl CompiledTemplate {
    pub(super) fn compile(source: &str) -> Result<CompiledTemplate, ChatError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        let syntax = syntax.map_err(|err| {
            ChatError::setup(format!("the template syntax cannot be set up: {err}"))
        })?;
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_DEPTH);
        environment.set_unknown_method_callback(python_method);
        environment.set_formatter(|out, state, value| {
            let text = limits::text(state, value)?;
            out.write_str(&text).map_err(Error::from)
        });
        limits::register(&mut environment);
        filters::register(&mut environment);
        environment.add_filter("tojson", tojson::filter);
        environment.add_filter("string", |state: &mut State, value: &Jinja| {
            limits::text(state, value).map(Cow::into_owned)
        });
        let trim = |state: &mut State, value: &Jinja, set: Option<Cow<'_, str>>| {
            let text = limits::text(state, value)?;
            let trimmed = python::strip(&text, set.as_deref(), python::StripSide::Both);
            Ok::<_, Error>(trimmed.to_owned())
        };
        environment.add_filter("trim", trim);
        // Python cannot iterate over None; minijinja can.
        environment.add_test("iterable", |value: &Jinja| {
            !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
        });
        environment.add_function("raise_exception", raise_exception);
        let program = bounded::compile(&without_generation_tags(source), &syntax)?;
        Ok(CompiledTemplate {
            environment,
            program,
            source: source.to_owned(),
        })
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    pub(super) fn run(&self, variables: &RenderContext<'_>) -> Result<String, ChatError> {
        let now_unix = variables.now_unix;
        let strftime_now =
            Jinja::from_function(move |format: Cow<'_, str>| clock::strftime(now_unix, &format));
        let own = [
            (limits::INPUT_BYTES, Jinja::from(variables.text_bytes())),
            ("messages", from_json(variables.messages)),
            ("tools", from_json(variables.tools)),
            ("documents", Jinja::from(())),
            (
                "add_generation_prompt",
                Jinja::from(variables.add_generation_prompt),
            ),
            ("strftime_now", strftime_now),
        ];
        let further = variables
            .further
            .iter()
            .map(|(name, value)| (name.as_str(), from_json(value)));
        let context = Jinja::from_pairs(further.chain(own));
        let mut text = String::new();
        minijinja::machinery::eval(
            &self.environment,
            &self.program.instructions,
            context,
            &self.program.blocks,
            &mut minijinja::machinery::make_string_output(&mut text),
            AutoEscape::None,
        )
        .map_err(|err| error(&err))?;
        Ok(text)
    }
}

fn raise_exception(message: Cow<'_, str>) -> Result<Jinja, Error> {
    let message = message.into_owned();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// An exception raised by the template keeps its message; other errors are the template's fault.
fn error(err: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(err);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return ChatError::template_refused(message.clone());
        }
        if let Some(OverLimit(what)) = current.downcast_ref() {
            return ChatError::template_limit(format!(
                "the chat template went over a limit: {what}"
            ));
        }
        cause = current.source();
    }
    if err.kind() == ErrorKind::OutOfFuel {
        return ChatError::template_limit(format!(
            "the chat template took more than {FUEL} steps on these messages"
        ));
    }
    ChatError::template_failed(format!("the chat template failed: {err}"))
}

/// Python's own set of blanks for the strip family; other methods as in the compatibility layer.
fn python_method(
    state: &mut State,
    value: &Jinja,
    method: &str,
    arguments: &[Jinja],
) -> Result<Jinja, Error> {
    let ends = match method {
        "strip" => python::StripSide::Both,
        "lstrip" => python::StripSide::Left,
        "rstrip" => python::StripSide::Right,
        _ => return filters::method(state, value, method, arguments),
    };
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => {
            let (set,): (Option<&str>,) = from_args(arguments)?;
            Ok(Jinja::from(python::strip(text, set, ends)))
        }
        _ => filters::method(state, value, method, arguments),
    }
}

/// The source without `{% generation %}` and `{% endgeneration %}`, which mark text for training.
///
/// A tag's dashes trim blanks around it, so each tag becomes a comment with the same dashes.
fn without_generation_tags(source: &str) -> String {
    let mut kept = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let inside = &rest[start + 2..start + length];
        let name = inside.trim_matches(['-', '+']).trim();
        kept.push_str(&rest[..start]);
        if matches!(name, "generation" | "endgeneration") {
            let left = if inside.starts_with('-') { "-" } else { "" };
            let right = if inside.ends_with('-') { "-" } else { "" };
            kept.push_str(&format!("{{#{left} {right}#}}"));
            // A block tag drops the line break after it; a comment does not.
            rest = &rest[start + length + 2..];
            if right.is_empty() {
                rest = rest.strip_prefix('\n').unwrap_or(rest);
            }
        } else {
            kept.push_str(&rest[start..start + length + 2]);
            rest = &rest[start + length + 2..];
        }
    }
    kept.push_str(rest);
    kept
}
