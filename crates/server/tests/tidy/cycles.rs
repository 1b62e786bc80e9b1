//! No import cycles between the files of a crate.
//!
//! A file imports another if it names an item of that file through `crate::`, `super::`, `self::`
//! or a child module. Re-exports are followed to the file that defines the item. Test code does not
//! count. Imports from parent modules do not count either, because a folder's `mod.rs` holds the
//! folder's vocabulary.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::source::{Source, is_test_only, module_of};

type Module = Vec<String>;

/// One file as a module.
struct Room {
    file: String,
    /// Names of items defined here.
    items: BTreeSet<String>,
    children: BTreeSet<String>,
    /// `use` of any visibility: the name here and the path as written. `*` stands for a glob.
    uses: Vec<(String, Vec<String>)>,
    /// Paths in code that have at least two segments.
    paths: Vec<Vec<String>>,
}

#[derive(Default)]
struct Reader {
    items: BTreeSet<String>,
    children: BTreeSet<String>,
    uses: Vec<(String, Vec<String>)>,
    paths: Vec<Vec<String>>,
}

fn flatten(tree: &syn::UseTree, before: &[String], out: &mut Vec<(String, Vec<String>)>) {
    let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
    match tree {
        syn::UseTree::Path(path) => flatten(&path.tree, &with(&path.ident), out),
        syn::UseTree::Name(name) if name.ident == "self" => {
            let last = before.last().cloned().unwrap_or_default();
            out.push((last, before.to_vec()));
        }
        syn::UseTree::Name(name) => out.push((name.ident.to_string(), with(&name.ident))),
        syn::UseTree::Rename(rename) => out.push((rename.rename.to_string(), with(&rename.ident))),
        syn::UseTree::Glob(_) => out.push(("*".to_owned(), before.to_vec())),
        syn::UseTree::Group(group) => {
            group
                .items
                .iter()
                .for_each(|item| flatten(item, before, out));
        }
    }
}

impl<'a> Visit<'a> for Reader {
    fn visit_item(&mut self, item: &'a syn::Item) {
        let (name, attributes): (Option<&syn::Ident>, &[syn::Attribute]) = match item {
            syn::Item::Const(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Enum(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Fn(item) => (Some(&item.sig.ident), &item.attrs),
            syn::Item::Static(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Struct(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Trait(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Type(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Macro(item) => (item.ident.as_ref(), &item.attrs),
            syn::Item::Impl(item) => (None, &item.attrs),
            syn::Item::Use(item) => (None, &item.attrs),
            syn::Item::Mod(item) => (None, &item.attrs),
            _ => (None, &[]),
        };
        if is_test_only(attributes) {
            return;
        }
        if let Some(name) = name {
            self.items.insert(name.to_string());
        }
        match item {
            syn::Item::Mod(module) if module.content.is_none() => {
                self.children.insert(module.ident.to_string());
            }
            syn::Item::Use(item) => flatten(&item.tree, &[], &mut self.uses),
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if parts.len() > 1 {
            self.paths.push(parts);
        }
        visit::visit_path(self, path);
    }
}

/// The modules of one package.
struct Package {
    rooms: BTreeMap<Module, Room>,
}

impl Package {
    fn of(sources: &[&Source]) -> Package {
        let mut rooms = BTreeMap::new();
        for source in sources {
            let mut reader = Reader::default();
            reader.visit_file(&source.file);
            let Reader {
                items,
                children,
                uses,
                paths,
            } = reader;
            let file = source.name.clone();
            rooms.insert(
                module_of(&file),
                Room {
                    file,
                    items,
                    children,
                    uses,
                    paths,
                },
            );
        }
        Package { rooms }
    }

    /// The file that defines the item of `path` as written in `module`; `None` for other crates.
    fn resolve(&self, module: &Module, path: &[String], fuel: usize) -> Option<&str> {
        let fuel = fuel.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        let (mut at, mut rest) = match first.as_str() {
            "crate" => (Vec::new(), rest),
            "self" => (module.clone(), rest),
            "super" => (module[..module.len().checked_sub(1)?].to_vec(), rest),
            _ => (module.clone(), path),
        };
        loop {
            let room = self.rooms.get(&at)?;
            let Some((name, more)) = rest.split_first() else {
                return Some(&room.file);
            };
            if name == "super" {
                at.pop();
            } else if room.children.contains(name) {
                at.push(name.clone());
            } else if room.items.contains(name) {
                return Some(&room.file);
            } else {
                let followed = |(_, target): &(String, Vec<String>)| {
                    let target = [target.as_slice(), more].concat();
                    self.resolve(&at, &target, fuel)
                };
                let named = room.uses.iter().find(|(here, _)| here == name);
                if let Some(use_) = named {
                    return followed(use_);
                }
                let globs = room.uses.iter().filter(|(here, _)| here == "*");
                return globs
                    .filter_map(|(_, target)| {
                        self.resolve(&at, &[target.as_slice(), rest].concat(), fuel)
                    })
                    .next();
            }
            rest = more;
        }
    }

    /// File -> files that it imports.
    fn arrows(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut arrows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (module, room) in &self.rooms {
            let used = room.uses.iter().map(|(_, path)| path);
            // A crate's root re-exports everything; its re-exports do not count as imports.
            let own: &mut dyn Iterator<Item = &Vec<String>> = if module.is_empty() {
                &mut room.paths.iter()
            } else {
                &mut used.chain(&room.paths)
            };
            for path in own {
                let Some(file) = self.resolve(module, path, 16) else {
                    continue;
                };
                if !module.starts_with(&module_of(file)) {
                    arrows.entry(&room.file).or_default().insert(file);
                }
            }
        }
        arrows
    }
}

/// Strongly connected components of more than one file.
fn cycles(arrows: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<Vec<String>> {
    let reach = |from: &str| -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from.to_owned()];
        while let Some(at) = open.pop() {
            for next in arrows.get(at.as_str()).into_iter().flatten() {
                if seen.insert((*next).to_owned()) {
                    open.push((*next).to_owned());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<String>> =
        arrows.keys().map(|file| (*file, reach(file))).collect();
    let mut found = BTreeSet::new();
    for (file, there) in &reached {
        let back = |other: &&String| {
            reached
                .get(other.as_str())
                .is_some_and(|there| there.contains(*file))
        };
        let mut circle: Vec<String> = there.iter().filter(back).cloned().collect();
        if there.contains(*file) {
            circle.sort();
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

#[test]
fn no_crate_has_an_import_cycle() {
    let sources = super::source::sources();
    let shipped: Vec<&Source> = sources.iter().filter(|source| source.ships()).collect();
    let packages: BTreeSet<&str> = shipped.iter().map(|source| source.package()).collect();
    let mut found = Vec::new();
    for package in packages {
        let own: Vec<&Source> = shipped
            .iter()
            .copied()
            .filter(|s| s.package() == package)
            .collect();
        let package = Package::of(&own);
        let arrows = package.arrows();
        for circle in cycles(&arrows) {
            let mut text = format!("{} files:", circle.len());
            for file in &circle {
                let to = arrows.get(file.as_str()).into_iter().flatten();
                let to: Vec<&str> = to
                    .copied()
                    .filter(|to| circle.iter().any(|c| c == to))
                    .collect();
                text += &format!("\n    {file} -> {}", to.join(", "));
            }
            found.push(text);
        }
    }
    super::check("files of a crate import each other in one direction", found);
}

#[test]
fn a_cycle_is_noticed() {
    let parse = |name: &str, text: &str| Source {
        name: format!("crates/x/src/{name}"),
        file: syn::parse_file(text).unwrap(),
    };
    let files = [
        parse("lib.rs", "mod a; mod b; pub use a::A;"),
        parse(
            "a/mod.rs",
            "mod c; pub use c::C; pub struct A(crate::b::B);",
        ),
        parse("a/c.rs", "use super::A; pub struct C(A);"),
        parse(
            "b.rs",
            "use crate::A; pub struct B; #[cfg(test)] mod tests { use super::*; }",
        ),
    ];
    let package = Package::of(&files.iter().collect::<Vec<_>>());
    let found = cycles(&package.arrows());
    let both = ["crates/x/src/a/mod.rs", "crates/x/src/b.rs"].map(str::to_owned);
    assert_eq!(found, [both.to_vec()]);
}
