//! The tracked Rust files, parsed.

use std::path::Path;

use syn::visit::{self, Visit};

/// A parsed file of `crates` or `benches`.
pub(crate) struct Source {
    /// Relative to the root, with forward slashes.
    pub(crate) name: String,
    pub(crate) file: syn::File,
}

impl Source {
    /// Whether the file belongs to a library or binary and not to tests.
    pub(crate) fn ships(&self) -> bool {
        let in_tests = self
            .name
            .split('/')
            .any(|part| part == "tests" || part == "tests.rs");
        self.name.contains("/src/") && !in_tests
    }

    /// The package's folder, such as `crates/decode`.
    pub(crate) fn package(&self) -> &str {
        self.name
            .split_once("/src/")
            .map_or("", |(package, _)| package)
    }
}

/// All tracked Rust files, without the fuzz workspace.
pub(crate) fn sources() -> Vec<Source> {
    super::tracked()
        .into_iter()
        .filter(|name| name.ends_with(".rs") && !name.starts_with("harness/fuzz/"))
        .map(|name| {
            let text = super::read(&name);
            let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            Source { name, file }
        })
        .collect()
}

/// Whether an item is compiled for tests only.
pub(crate) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string(),
            _ => return false,
        };
        text == "test" || text.starts_with("all (test") || text.starts_with("any (test")
    })
}

/// The names of types that a file defines, test modules included.
pub(crate) fn defined_types(file: &syn::File) -> Vec<String> {
    struct Types(Vec<String>);
    impl<'a> Visit<'a> for Types {
        fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
            self.0.push(item.ident.to_string());
            visit::visit_item_struct(self, item);
        }
        fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
            self.0.push(item.ident.to_string());
            visit::visit_item_enum(self, item);
        }
        fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
            self.0.push(item.ident.to_string());
            visit::visit_item_trait(self, item);
        }
        fn visit_item_type(&mut self, item: &'a syn::ItemType) {
            self.0.push(item.ident.to_string());
        }
        fn visit_item_union(&mut self, item: &'a syn::ItemUnion) {
            self.0.push(item.ident.to_string());
        }
    }
    let mut types = Types(Vec::new());
    types.visit_file(file);
    types.0
}

/// Lines on which a `match` has `true` or `false` as a pattern of its own.
pub(crate) fn bool_matches(file: &syn::File) -> Vec<usize> {
    struct Matches(Vec<usize>);
    impl<'a> Visit<'a> for Matches {
        fn visit_expr_match(&mut self, item: &'a syn::ExprMatch) {
            let is_bool = |arm: &syn::Arm| {
                let syn::Pat::Lit(literal) = &arm.pat else {
                    return false;
                };
                matches!(literal.lit, syn::Lit::Bool(_))
            };
            if item.arms.iter().any(is_bool) {
                self.0.push(item.match_token.span.start().line);
            }
            visit::visit_expr_match(self, item);
        }
    }
    let mut matches = Matches(Vec::new());
    matches.visit_file(file);
    matches.0
}

/// The module path of a shipped file inside its package: `src/a/mod.rs` and `src/a.rs` are `[a]`.
pub(crate) fn module_of(name: &str) -> Vec<String> {
    let inside = name.split_once("/src/").map_or(name, |(_, inside)| inside);
    let stem = Path::new(inside).with_extension("");
    let mut parts: Vec<String> = stem
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if matches!(
        parts.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        parts.pop();
    }
    parts
}
