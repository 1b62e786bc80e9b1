//! The parameters that a tool's schema allows, as tool calls in tags name them.
//!
//! Such a call names each argument in a tag of its own, so the keywords of objects at the root
//! become alternatives of named parameters.

use serde_json::{Map, Value, json};

use super::schema_source::{SchemaSource, whole_number};
use crate::error::ChatError;
use crate::request::SchemaStrictness;

/// Most alternatives at the root.
const MAX_ALTERNATIVES: usize = 32;
/// Most references and alternatives to follow.
const MAX_DEPTH: usize = 16;

/// One alternative of a tool's arguments.
#[derive(Debug, Clone, Default)]
pub(super) struct ArgumentObject {
    /// The declared parameters, in order.
    pub(super) parameters: Vec<Parameter>,
    /// Schemas of parameters by patterns of their names.
    pub(super) by_pattern: Vec<(String, Value)>,
    /// What `additionalProperties` says, if anything.
    additional: Option<Value>,
    /// Whether there is a list of properties, which closes the object unless it says otherwise.
    lists_properties: bool,
    required: Vec<String>,
    min_properties: u64,
    max_properties: Option<u64>,
}

/// One parameter.
#[derive(Debug, Clone)]
pub(super) struct Parameter {
    /// Its name.
    pub(super) key: String,
    /// All that its values must match.
    pub(super) schema: Value,
    /// Whether every call names it.
    pub(super) is_required: bool,
}

impl ArgumentObject {
    /// The alternatives of the document's root. If it is strict, a keyword that cannot be kept is
    /// an error.
    pub(super) fn alternatives(
        source: &SchemaSource<'_>,
    ) -> Result<Vec<ArgumentObject>, ChatError> {
        let mut objects = read(source.root, source, 0)?;
        if source.root.as_object().is_some_and(Map::is_empty) {
            // A tool without a schema has no parameters.
            objects
                .iter_mut()
                .for_each(|object| object.lists_properties = true);
        }
        let mut finished = Vec::new();
        for object in objects {
            finished.extend(object.finish(source)?);
        }
        if finished.is_empty() {
            return Err(source.error("root allows no object"));
        }
        Ok(finished)
    }

    /// The schema of parameters that neither a name nor a pattern covers, if there may be any.
    pub(super) fn additional(&self) -> Option<&Value> {
        static ANY: Value = Value::Bool(true);
        match &self.additional {
            Some(Value::Bool(false)) => None,
            Some(Value::Bool(true)) if !self.parameters.is_empty() => None,
            Some(schema) => Some(schema),
            None if self.lists_properties || !self.by_pattern.is_empty() => None,
            None => Some(&ANY),
        }
    }

    /// What the keywords other than `properties` say of a parameter's value.
    fn unnamed(&self, key: &str) -> Option<Value> {
        let mut schemas = self.by_pattern.iter().filter(|(pattern, _)| {
            regex::Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(key))
        });
        match schemas.next() {
            Some((_, first)) => {
                let first = first.clone();
                Some(schemas.fold(first, |all, (_, schema)| both(all, schema.clone())))
            }
            None => self.additional.clone(),
        }
    }

    /// Both at once.
    fn merged(&self, other: &ArgumentObject) -> ArgumentObject {
        let mut merged = ArgumentObject {
            min_properties: self.min_properties.max(other.min_properties),
            max_properties: match (self.max_properties, other.max_properties) {
                (Some(one), Some(two)) => Some(one.min(two)),
                (one, two) => one.or(two),
            },
            additional: match (&self.additional, &other.additional) {
                (Some(one), Some(two)) => Some(both(one.clone(), two.clone())),
                (one, two) => one.as_ref().or(two.as_ref()).cloned(),
            },
            lists_properties: self.lists_properties || other.lists_properties,
            required: self.required.clone(),
            ..ArgumentObject::default()
        };
        for key in &other.required {
            if !merged.required.contains(key) {
                merged.required.push(key.clone());
            }
        }
        for (object, beside) in [(self, other), (other, self)] {
            for Parameter { key, schema, .. } in &object.parameters {
                if merged.parameter(key).is_some() {
                    continue;
                }
                let there = match beside.parameter(key) {
                    Some(parameter) => Some(parameter.schema.clone()),
                    None => beside.unnamed(key),
                };
                merged.parameters.push(Parameter {
                    key: key.clone(),
                    schema: match there {
                        Some(there) => both(schema.clone(), there),
                        None => schema.clone(),
                    },
                    is_required: false,
                });
            }
            for (pattern, schema) in &object.by_pattern {
                let there = match beside.by_pattern.iter().find(|(other, _)| other == pattern) {
                    Some(_) if merged.by_pattern.iter().any(|(other, _)| other == pattern) => {
                        continue;
                    }
                    Some((_, schema)) => Some(schema),
                    None => beside.additional.as_ref(),
                };
                let schema = match there {
                    Some(there) => both(schema.clone(), there.clone()),
                    None => schema.clone(),
                };
                merged.by_pattern.push((pattern.clone(), schema));
            }
        }
        merged
    }

    fn parameter(&self, key: &str) -> Option<&Parameter> {
        self.parameters
            .iter()
            .find(|parameter| parameter.key == key)
    }

    /// Declares what is required, and drops what nothing matches; `None` if nothing is left.
    fn finish(mut self, source: &SchemaSource<'_>) -> Result<Option<ArgumentObject>, ChatError> {
        for key in std::mem::take(&mut self.required) {
            let undeclared = self.unnamed(&key).unwrap_or(Value::Bool(true));
            match self
                .parameters
                .iter_mut()
                .find(|parameter| parameter.key == key)
            {
                Some(parameter) => parameter.is_required = true,
                None => self.parameters.push(Parameter {
                    key,
                    schema: undeclared,
                    is_required: true,
                }),
            }
        }
        let is_false = |parameter: &Parameter| parameter.schema == Value::Bool(false);
        if self
            .parameters
            .iter()
            .any(|one| one.is_required && is_false(one))
        {
            return Ok(None);
        }
        self.parameters.retain(|parameter| !is_false(parameter));
        self.by_pattern
            .retain(|(_, schema)| *schema != Value::Bool(false));
        if source.strictness == SchemaStrictness::Strict {
            let n_required = self.parameters.iter().filter(|one| one.is_required).count() as u64;
            if self.min_properties > n_required {
                return Err(source.error(
                    "keyword 'minProperties' is not supported above the number of required \
                     properties; it stands at #",
                ));
            }
            let is_open = self.additional().is_some() || !self.by_pattern.is_empty();
            let most = self.max_properties.unwrap_or(u64::MAX);
            if most < n_required {
                return Ok(None);
            }
            if is_open && self.max_properties.is_some() || most < self.parameters.len() as u64 {
                return Err(source.error(
                    "keyword 'maxProperties' is not supported below the number of properties; \
                     it stands at #",
                ));
            }
        }
        Ok(Some(self))
    }
}

/// A schema of what matches both.
fn both(one: Value, other: Value) -> Value {
    match (one, other) {
        (Value::Bool(true), schema) | (schema, Value::Bool(true)) => schema,
        (Value::Bool(false), _) | (_, Value::Bool(false)) => Value::Bool(false),
        (one, other) if one == other => one,
        (one, other) => json!({"allOf": [one, other]}),
    }
}

fn read(
    schema: &Value,
    source: &SchemaSource<'_>,
    depth: usize,
) -> Result<Vec<ArgumentObject>, ChatError> {
    let map = match schema {
        Value::Bool(false) => return Ok(Vec::new()),
        Value::Object(map) => map,
        _ => return Ok(vec![ArgumentObject::default()]),
    };
    let is_strict = source.strictness == SchemaStrictness::Strict;
    if depth >= MAX_DEPTH {
        if is_strict {
            return Err(source.error("references nest too deep at its root"));
        }
        return Ok(vec![ArgumentObject::default()]);
    }
    let is_object = match map.get("type") {
        Some(Value::String(name)) => name == "object",
        Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
        _ => true,
    };
    // The arguments of a call are an object, so a root of another type is a slip.
    if !is_object && depth > 0 {
        return Ok(Vec::new());
    }
    let mut objects = vec![own_keywords(schema)];
    if let Some(target) = source.target(schema) {
        objects = product(objects, &read(target, source, depth + 1)?);
    }
    let listed = [map.get("const").map(std::slice::from_ref), listed(map)];
    for values in listed.into_iter().flatten() {
        let fixed: Vec<ArgumentObject> = values.iter().filter_map(fixed_object).collect();
        objects = product(objects, &fixed);
    }
    for keyword in ["allOf", "anyOf", "oneOf"] {
        let Some(Value::Array(parts)) = map.get(keyword) else {
            continue;
        };
        let mut union: Vec<ArgumentObject> = Vec::new();
        for part in parts {
            let read = read(part, source, depth + 1)?;
            if keyword == "allOf" {
                objects = product(objects, &read);
                continue;
            }
            if keyword == "oneOf" && is_strict && !are_disjoint(&union, &read, source) {
                return Err(source.error(
                    "keyword 'oneOf' is not supported where several branches may match; it stands \
                     at #",
                ));
            }
            union.extend(read);
        }
        if keyword != "allOf" {
            objects = product(objects, &union);
        }
        if objects.len() > MAX_ALTERNATIVES {
            let message = format!("root has more than {MAX_ALTERNATIVES} alternatives");
            return Err(source.error(&message));
        }
    }
    Ok(objects)
}

fn listed(map: &Map<String, Value>) -> Option<&[Value]> {
    map.get("enum").and_then(Value::as_array).map(Vec::as_slice)
}

/// The one object that equals `value`, if it is an object.
fn fixed_object(value: &Value) -> Option<ArgumentObject> {
    let map = value.as_object()?;
    let parameter = |(key, value): (&String, &Value)| Parameter {
        key: key.clone(),
        schema: json!({ "const": value }),
        is_required: false,
    };
    Some(ArgumentObject {
        parameters: map.iter().map(parameter).collect(),
        additional: Some(Value::Bool(false)),
        lists_properties: true,
        required: map.keys().cloned().collect(),
        ..ArgumentObject::default()
    })
}

fn product(objects: Vec<ArgumentObject>, others: &[ArgumentObject]) -> Vec<ArgumentObject> {
    let mut all = Vec::new();
    for object in &objects {
        let room = MAX_ALTERNATIVES + 1 - all.len().min(MAX_ALTERNATIVES + 1);
        all.extend(others.iter().take(room).map(|other| object.merged(other)));
    }
    all
}

/// Whether a parameter that both require has no value in common.
fn are_disjoint(
    objects: &[ArgumentObject],
    others: &[ArgumentObject],
    source: &SchemaSource<'_>,
) -> bool {
    let tag = |object: &ArgumentObject, key: &str| -> Option<Vec<Value>> {
        let schema = &object
            .parameter(key)
            .filter(|_| object.required.iter().any(|k| k == key))?
            .schema;
        let schema = source.target(schema).unwrap_or(schema);
        match (schema.get("const"), schema.get("enum")) {
            (Some(value), _) => Some(vec![value.clone()]),
            (None, Some(Value::Array(values))) => Some(values.clone()),
            _ => None,
        }
    };
    let differ = |one: &ArgumentObject, other: &ArgumentObject| {
        one.required.iter().any(|key| {
            let values = tag(one, key).zip(tag(other, key));
            values.is_some_and(|(one, other)| !one.iter().any(|value| other.contains(value)))
        })
    };
    objects
        .iter()
        .all(|one| others.iter().all(|other| differ(one, other)))
}

/// What a schema's own keywords say.
fn own_keywords(schema: &Value) -> ArgumentObject {
    let members = |keyword: &str| {
        let map = schema.get(keyword).and_then(Value::as_object);
        map.into_iter().flatten()
    };
    let by_pattern: Vec<(String, Value)> = members("patternProperties")
        .map(|(pattern, schema)| (pattern.clone(), schema.clone()))
        .collect();
    let matching = ArgumentObject {
        by_pattern: by_pattern.clone(),
        ..ArgumentObject::default()
    };
    let parameters = members("properties").map(|(key, schema)| Parameter {
        key: key.clone(),
        schema: match matching.unnamed(key) {
            Some(there) => both(schema.clone(), there),
            None => schema.clone(),
        },
        is_required: false,
    });
    let required = schema.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    let count = |keyword: &str| schema.get(keyword).and_then(whole_number);
    ArgumentObject {
        parameters: parameters.collect(),
        by_pattern,
        additional: schema.get("additionalProperties").cloned(),
        lists_properties: schema.get("properties").is_some(),
        required: required.map(str::to_owned).collect(),
        min_properties: count("minProperties").unwrap_or(0),
        max_properties: count("maxProperties"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_that_lists_its_values_allows_only_their_objects() {
        let root = json!({"enum": ["x", {"a": 1}, {}, {"a": 2, "b": true}], "required": ["a"]});
        let source = SchemaSource {
            root: &root,
            strictness: SchemaStrictness::Strict,
            field: "tools",
        };
        let objects = ArgumentObject::alternatives(&source).unwrap();
        let shown: Vec<Vec<(&str, &Value)>> = objects
            .iter()
            .map(|object| {
                let parameters = object.parameters.iter().filter(|one| one.is_required);
                parameters.map(|one| (&*one.key, &one.schema)).collect()
            })
            .collect();
        let (one, two, yes) = (
            json!({"const": 1}),
            json!({"const": 2}),
            json!({"const": true}),
        );
        assert_eq!(shown, [vec![("a", &one)], vec![("a", &two), ("b", &yes)]]);
        assert!(objects.iter().all(|object| object.additional().is_none()));
    }
}
