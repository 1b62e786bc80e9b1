//! References inside a schema, all in one form.

use std::collections::HashMap;

use serde_json::Value;

/// Keywords whose values are no schemas.
const PLAIN_DATA: [&str; 4] = ["const", "enum", "default", "examples"];

/// The schema with every reference that leads inside it as a pointer from its root: references may
/// also name an `$id`, an `$anchor`, or a pointer from the nearest `$id`.
pub(crate) fn with_plain_references(schema: &Value) -> Value {
    let mut names = Names::default();
    names.by_uri.insert(String::new(), String::new());
    names.collect(schema, "", "");
    let mut schema = schema.clone();
    // The pointers are right as they are if only the root has a name.
    if names.has_inner_names || names.has_root_name {
        names.rewrite(&mut schema, "");
    }
    schema
}

/// The target of a reference.
pub(crate) fn resolve_pointer<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(&percent_decoded(reference.strip_prefix('#')?))
}

/// The pointer in a reference's fragment.
pub(crate) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|d| std::str::from_utf8(d).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (first, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The pointers of named parts.
#[derive(Default)]
struct Names {
    /// By absolute address; an anchor follows `#`.
    by_uri: HashMap<String, String>,
    has_root_name: bool,
    has_inner_names: bool,
}

impl Names {
    fn collect(&mut self, part: &Value, pointer: &str, base: &str) {
        match part {
            Value::Object(map) => {
                let base = own_base(part, base);
                if map.get("$id").is_some_and(Value::is_string) {
                    if pointer.is_empty() {
                        self.has_root_name = true;
                    } else {
                        self.has_inner_names = true;
                    }
                    self.by_uri
                        .entry(base.clone())
                        .or_insert_with(|| pointer.to_owned());
                }
                for keyword in ["$anchor", "$dynamicAnchor"] {
                    if let Some(Value::String(anchor)) = map.get(keyword) {
                        self.has_inner_names = true;
                        let uri = format!("{base}#{anchor}");
                        self.by_uri.entry(uri).or_insert_with(|| pointer.to_owned());
                    }
                }
                for (key, inner) in map {
                    if !PLAIN_DATA.contains(&key.as_str()) {
                        self.collect(inner, &child(pointer, key), &base);
                    }
                }
            }
            Value::Array(items) => {
                for (i, inner) in items.iter().enumerate() {
                    self.collect(inner, &child(pointer, &i.to_string()), base);
                }
            }
            _ => {}
        }
    }

    fn rewrite(&self, part: &mut Value, base: &str) {
        let base = own_base(part, base);
        match part {
            Value::Object(map) => {
                if let Some(Value::String(reference)) = map.get_mut("$ref")
                    && let Some(pointer) = self.pointer(reference, &base)
                {
                    *reference = format!("#{pointer}");
                }
                // Nothing refers to the names any more, and the result is its own plain form.
                for name in ["$id", "$anchor"] {
                    if map.get(name).is_some_and(Value::is_string) {
                        map.shift_remove(name);
                    }
                }
                for (key, inner) in map {
                    if !PLAIN_DATA.contains(&key.as_str()) {
                        self.rewrite(inner, &base);
                    }
                }
            }
            Value::Array(items) => items
                .iter_mut()
                .for_each(|inner| self.rewrite(inner, &base)),
            _ => {}
        }
    }

    /// The pointer that a reference means, with its own escapes; `None` if it leads out.
    fn pointer(&self, reference: &str, base: &str) -> Option<String> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let uri = if uri.is_empty() {
            base.to_owned()
        } else {
            joined(base, uri)
        };
        if fragment.is_empty() || fragment.starts_with('/') {
            let resource = self.by_uri.get(&uri)?;
            return Some(format!("{resource}{fragment}"));
        }
        let named = self
            .by_uri
            .get(&format!("{uri}#{}", percent_decoded(fragment)));
        named.cloned()
    }
}

/// The address that references in a part are relative to.
fn own_base(part: &Value, base: &str) -> String {
    match part.get("$id") {
        Some(Value::String(id)) => joined(base, id.trim_end_matches('#')),
        _ => base.to_owned(),
    }
}

/// A pointer one step further down.
fn child(pointer: &str, key: &str) -> String {
    format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"))
}

/// An address relative to another.
fn joined(base: &str, address: &str) -> String {
    let address = address.strip_prefix("./").unwrap_or(address);
    let scheme_end = base.find(':').map_or(0, |at| at + 1);
    let has_scheme = address.find(':').is_some_and(|at| {
        address[..at]
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    });
    if has_scheme || base.is_empty() {
        return address.to_owned();
    }
    if address.starts_with("//") {
        return format!("{}{address}", &base[..scheme_end]);
    }
    let path = match base[scheme_end..].strip_prefix("//") {
        Some(rest) => rest.find('/').map_or(base.len(), |at| scheme_end + 2 + at),
        None => scheme_end,
    };
    if address.starts_with('/') {
        return format!("{}{address}", &base[..path]);
    }
    match base[path..].rfind('/') {
        Some(at) => format!("{}{address}", &base[..=path + at]),
        None if path == base.len() => format!("{base}/{address}"),
        None => format!("{}{address}", &base[..path]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reference_by_name_becomes_a_pointer() {
        let schema = json!({
            "$id": "https://a.org/schemas/root.json",
            "properties": {
                "anchor": {"$ref": "#word"},
                "relative": {"$ref": "item"},
                "dotted": {"$ref": "./item"},
                "absolute": {"$ref": "https://a.org/schemas/item"},
                "rooted": {"$ref": "/schemas/item#/properties/n"},
                "self": {"$ref": "#"},
                "pointer": {"$ref": "#/$defs/a~1b"},
                "outside": {"$ref": "https://b.org/x"},
                "data": {"const": {"$ref": "#word"}},
            },
            "$defs": {
                "a/b": {"$anchor": "word", "type": "string"},
                "item": {"$id": "item", "properties": {"n": {"$ref": "#inner"}, "m": {"$ref": "#/properties/n"}},
                    "$defs": {"i": {"$anchor": "inner"}}},
            },
        });
        let plain = with_plain_references(&schema);
        for (pointer, expected) in [
            ("/properties/anchor/$ref", "#/$defs/a~1b"),
            ("/properties/relative/$ref", "#/$defs/item"),
            ("/properties/dotted/$ref", "#/$defs/item"),
            ("/properties/absolute/$ref", "#/$defs/item"),
            ("/properties/rooted/$ref", "#/$defs/item/properties/n"),
            ("/properties/self/$ref", "#"),
            ("/properties/pointer/$ref", "#/$defs/a~1b"),
            ("/properties/outside/$ref", "https://b.org/x"),
            ("/properties/data/const/$ref", "#word"),
            ("/$defs/item/properties/n/$ref", "#/$defs/item/$defs/i"),
            ("/$defs/item/properties/m/$ref", "#/$defs/item/properties/n"),
        ] {
            assert_eq!(plain.pointer(pointer), Some(&json!(expected)), "{pointer}");
        }
        assert_eq!(with_plain_references(&plain), plain);
        let nameless = json!({"$ref": "#/$defs/x", "$defs": {"x": {}}});
        assert_eq!(with_plain_references(&nameless), nameless);
    }
}
