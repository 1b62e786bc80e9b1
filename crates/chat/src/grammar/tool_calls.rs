//! Grammars of tool calls in the model's own tags, with arguments typed by the tools' schemas.

use std::fmt::Write;

use serde_json::{Value, json};

use super::argument_values::ArgumentValue;
use super::arguments::{ArgumentObject, Parameter};
use super::json_schema::{prepare_schema, prepare_with_notes};
use super::schema_source::SchemaSource;
use super::search_pattern::search_terminal;
use super::writer::{GrammarWriter, Typing};
use super::{OutputGrammar, ToolCallMarkup, literal, pattern_literal};
use crate::error::ChatError;
use crate::request::SchemaStrictness;
use crate::template::ToolCallFormat;
use crate::tools::{ParameterSchemas, Tool, ToolSet};

/// The request field named in errors.
const FIELD: &str = "tools";

/// A reply of tool calls only: of the tool `only` or of any tool; several calls if `several`.
pub(super) fn tool_calls(
    markup: ToolCallMarkup<'_>,
    tools: &ToolSet,
    only: Option<&str>,
    several: bool,
) -> Result<OutputGrammar, ChatError> {
    let listed = || {
        tools
            .iter()
            .filter(|tool| only.is_none_or(|name| tool.name == name))
    };
    let write = |typing: Typing| {
        let more = if several { " (\"\\n\" call)*" } else { "" };
        let mut rules = GrammarWriter::new(markup, format!("start: call{more}\n"), typing);
        rules.call(listed())?;
        Ok((rules.text, rules.notes))
    };
    with_fallback(write)
}

/// Text with typed tool calls anywhere in it.
pub(super) fn text_with_tool_calls(
    markup: ToolCallMarkup<'_>,
    tools: &ToolSet,
) -> Result<OutputGrammar, ChatError> {
    let tags = &markup.tokenizer.markup().tool_calls;
    let escaped = |tag: &str| pattern_literal(&regex::escape(tag));
    // A call that is spelled in letters would escape its schema.
    let call = [&tags.open, &tags.alternate_open]
        .map(|tag| escaped(tag))
        .join("|");
    let line = escaped(&tags.function_open);
    let start = format!(
        "start: TEXT? (call TEXT?)*\n\
         TEXT: /(?s:.+)/ & ~/(?s:.*)({call})(?s:.*)|(?s:.*\\n)?[^\\S\\n]*{line}(?s:.*)/\n"
    );
    let write = |typing: Typing| {
        let mut rules = GrammarWriter::new(markup, start.clone(), typing);
        rules.call(tools.iter())?;
        Ok((rules.text, rules.notes))
    };
    with_fallback(write)
}

/// The grammar by schema. Tools that are not strict have a loose fallback.
fn with_fallback(
    write: impl Fn(Typing) -> Result<(String, Vec<String>), ChatError>,
) -> Result<OutputGrammar, ChatError> {
    let (lark, mut notes) = write(Typing::BySchema)?;
    let (loose, _) = write(Typing::Loose)?;
    notes.sort();
    notes.dedup();
    Ok(OutputGrammar {
        fallback: (loose != lark).then_some(loose),
        lark,
        field: FIELD.to_owned(),
        notes,
    })
}

impl GrammarWriter<'_> {
    /// The rule `call`, of any of `tools`.
    fn call<'t>(&mut self, tools: impl Iterator<Item = &'t Tool>) -> Result<(), ChatError> {
        let tokenizer = self.markup.tokenizer;
        let tags = self.tags();
        let mark = |text: &str| match tokenizer.id_of(text) {
            Some(id) => format!("<[{}]>", id.0),
            None => literal(text),
        };
        let mut names = Vec::new();
        let typing = self.typing;
        for (i, tool) in tools.enumerate() {
            let name = format!("tool_{i}");
            let body = self.tool_call(i, tool, typing)?;
            self.rule(&name, &body);
            names.push(name);
        }
        let (open, close) = (mark(&tags.open), mark(&tags.close));
        let body = format!("{open} \"\\n\" ({}) \"\\n\" {close}", names.join(" | "));
        self.rule("call", &body);
        Ok(())
    }

    /// A call of one tool. What is not strict is typed loosely if its schema cannot be kept.
    fn tool_call(&mut self, i: usize, tool: &Tool, typing: Typing) -> Result<String, ChatError> {
        self.typing = if tool.is_strict() {
            Typing::BySchema
        } else {
            typing
        };
        let (n_bytes, had_text) = (self.text.len(), (self.has_any_text, self.has_marked_text));
        let write = |rules: &mut Self| match rules.markup.format {
            ToolCallFormat::JsonInTags => rules.json_call(tool),
            ToolCallFormat::XmlParameters => rules.xml_call(i, tool),
        };
        match write(self) {
            Err(error) if tool.is_strict() => {
                let field = format!("{FIELD}: ");
                let what = error.message.strip_prefix(&field).unwrap_or(&error.message);
                let message = format!("the strict tool {:?}: {what}", tool.name);
                Err(ChatError::field(FIELD, message))
            }
            Err(error) if self.typing == Typing::BySchema => {
                let what = &error.message;
                let note = format!("{what}; the arguments of {:?} are not typed", tool.name);
                tracing::info!("{note}");
                self.notes.push(note);
                self.text.truncate(n_bytes);
                (self.has_any_text, self.has_marked_text) = had_text;
                self.typing = Typing::Loose;
                write(self)
            }
            body => body,
        }
    }

    fn json_call(&mut self, tool: &Tool) -> Result<String, ChatError> {
        let schema = match (&tool.parameters, self.typing) {
            (Some(parameters), Typing::BySchema) => {
                let mut schema = parameters.clone();
                if let Value::Object(map) = &mut schema {
                    map.insert("type".to_owned(), "object".into());
                }
                let strictness = strictness_of(tool);
                let (schema, notes) = prepare_with_notes(&schema, None, strictness, FIELD)?;
                self.notes.extend(notes);
                schema
            }
            _ => prepare_schema(
                &json!({"type": "object"}),
                SchemaStrictness::BestEffort,
                FIELD,
            )?,
        };
        let head = format!("{{\"name\": {}, \"arguments\": ", Value::from(&*tool.name));
        Ok(format!("{} %json {schema} \"}}\"", literal(&head)))
    }

    fn xml_call(&mut self, index: usize, tool: &Tool) -> Result<String, ChatError> {
        let none = json!({});
        let root = tool.parameters.as_ref().filter(|root| root.is_object());
        let root = root.unwrap_or(&none);
        let source = SchemaSource {
            root,
            strictness: strictness_of(tool),
            field: FIELD,
        };
        // Names every keyword that cannot be kept, wherever it stands.
        match prepare_with_notes(root, None, source.strictness, FIELD) {
            Ok((_, notes)) => self.notes.extend(notes),
            Err(error) if tool.is_strict() => return Err(error),
            Err(_) => {}
        }
        let parser = ParameterSchemas::new(tool.parameters.as_ref());
        let mut bodies = Vec::new();
        for (alternative, object) in ArgumentObject::alternatives(&source)?.iter().enumerate() {
            let name = match alternative {
                0 => format!("{index}"),
                other => format!("{index}_{other}"),
            };
            bodies.extend(self.arguments(&name, object, &source, &parser)?);
        }
        if bodies.is_empty() {
            return Err(source.error("required values cannot be written in the model's tags"));
        }
        let tags = self.tags();
        let head = literal(&format!("{}{}>\n", tags.function_open, tool.name));
        let end = literal(&tags.function_close);
        let body = match &*bodies {
            [only] => only.clone(),
            several => format!(" ({})", several.join(" |")),
        };
        Ok(format!("{head}{body} {end}"))
    }

    /// The parameters of one alternative; `None` if a required one cannot be written.
    fn arguments(
        &mut self,
        name: &str,
        object: &ArgumentObject,
        source: &SchemaSource<'_>,
        parser: &ParameterSchemas,
    ) -> Result<Option<String>, ChatError> {
        let open = self.tags().parameter_open.clone();
        let mut body = String::new();
        for (i, parameter) in object.parameters.iter().enumerate() {
            let Parameter { key, schema, .. } = parameter;
            let name = format!("value_{name}_{i}");
            let value = ArgumentValue {
                schema,
                source: *source,
                read_as: parser.parameter(key),
            };
            let value = if is_parameter_name(key) {
                self.argument_value(&name, &value)?
            } else {
                None
            };
            match value {
                Some(value) => {
                    let head = literal(&format!("{open}{key}>\n"));
                    self.rule(&name, &format!("{head} {value}"));
                    let mark = if parameter.is_required { "" } else { "?" };
                    let _ = write!(body, " {name}{mark}");
                }
                None if parameter.is_required => return Ok(None),
                None => {}
            }
        }
        let mut more = Vec::new();
        for (i, (pattern, schema)) in object.by_pattern.iter().enumerate() {
            let Some(terminal) = search_terminal(pattern) else {
                if source.strictness == SchemaStrictness::BestEffort {
                    continue;
                }
                let message = format!("keyword 'patternProperties' cannot be kept for {pattern:?}");
                return Err(source.error(&message));
            };
            let others = object.by_pattern.iter().enumerate();
            let others = others.filter(|(other, _)| *other != i);
            let others = others.filter_map(|(_, (pattern, _))| search_terminal(pattern));
            let mut keys = format!("{PARAMETER_NAME} & /{terminal}/");
            others.for_each(|other| keys.push_str(&format!(" & ~/{other}/")));
            let value = ArgumentValue {
                schema,
                source: *source,
                read_as: parser.type_of(schema),
            };
            more.extend(self.unnamed(&format!("{name}_{i}"), &keys, object, &value)?);
        }
        if let Some(schema) = object.additional() {
            let mut keys = PARAMETER_NAME.to_owned();
            for (pattern, _) in &object.by_pattern {
                if let Some(terminal) = search_terminal(pattern) {
                    keys.push_str(&format!(" & ~/{terminal}/"));
                }
            }
            let value = ArgumentValue {
                schema,
                source: *source,
                read_as: parser.additional_type(),
            };
            more.extend(self.unnamed(name, &keys, object, &value)?);
        }
        if !more.is_empty() {
            let _ = write!(body, " ({})*", more.join(" | "));
        }
        Ok(Some(body))
    }

    /// The rule of parameters whose names match `keys`, other than the declared ones.
    fn unnamed(
        &mut self,
        name: &str,
        keys: &str,
        object: &ArgumentObject,
        value: &ArgumentValue<'_>,
    ) -> Result<Option<String>, ChatError> {
        let rule = format!("any_{name}");
        let Some(value) = self.argument_value(&rule, value)? else {
            return Ok(None);
        };
        let declared: Vec<String> = object
            .parameters
            .iter()
            .map(|parameter| pattern_literal(&regex::escape(&parameter.key)))
            .collect();
        let mut keys = keys.to_owned();
        if !declared.is_empty() {
            keys.push_str(&format!(" & ~/({})/", declared.join("|")));
        }
        let terminal = format!("KEY_{}", name.to_uppercase());
        self.rule(&terminal, &keys);
        let open = literal(&self.tags().parameter_open);
        self.rule(&rule, &format!("{open} {terminal} \">\\n\" {value}"));
        Ok(Some(rule))
    }
}

/// Names of parameters that no schema declares.
const PARAMETER_NAME: &str = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/";

/// Whether the parser reads a parameter's name as it is.
fn is_parameter_name(key: &str) -> bool {
    let read = key.trim().trim_matches(['"', '\'']);
    read == key && !key.is_empty() && !key.contains(['>', '\n'])
}

fn strictness_of(tool: &Tool) -> SchemaStrictness {
    if tool.is_strict() {
        SchemaStrictness::Strict
    } else {
        SchemaStrictness::BestEffort
    }
}
