// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the dependencies between modules of a crate in the `use` lines and paths of its sources.
//!
//! Only paths that begin with `crate`, `self` or `super` count. Test modules (`#[cfg(test)]`) may
//! use any module and are skipped. A module and its submodules are one unit, so only dependencies
//! between siblings count at each level.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Attribute, Item, ItemMod, ItemUse, UseTree,
    visit::{self, Visit},
};

/// Path of a module in its crate; empty for the crate root.
pub type ModulePath = Vec<String>;

/// Modules of a crate and the paths that each module uses.
#[derive(Debug, Default)]
pub struct Modules {
    modules: BTreeSet<ModulePath>,
    uses: Vec<(ModulePath, ModulePath)>,
}

impl Modules {
    pub fn read(root: &Path) -> Self {
        let mut modules = Self::default();
        let folder = root.parent().expect("a folder").to_owned();
        modules.read_file(&[], root, &folder);
        modules
    }

    /// Reads the file of a module whose submodules are files in `folder`.
    fn read_file(&mut self, module: &[String], file: &Path, folder: &Path) {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        self.read_items(module, &parsed.items, folder);
    }

    fn read_items(&mut self, module: &[String], items: &[Item], folder: &Path) {
        self.modules.insert(module.to_vec());
        let mut paths = UsedPaths { module: module.to_vec(), paths: Vec::new() };
        items.iter().for_each(|item| paths.visit_item(item));
        self.uses.extend(paths.paths.into_iter().map(|path| (module.to_vec(), path)));
        for item in items {
            let Item::Mod(item) = item else { continue };
            if is_test_only(&item.attrs) {
                continue;
            }
            let name = item.ident.to_string();
            let mut inner = module.to_vec();
            inner.push(name.clone());
            match &item.content {
                Some((_, items)) => {
                    self.read_items(&inner, items, &folder.join(&name));
                }
                None => {
                    let (file, folder) = module_file(folder, &name);
                    self.read_file(&inner, &file, &folder);
                }
            }
        }
    }

    /// Returns the dependencies between siblings: the parent module, the user and the used module.
    pub fn sibling_uses(&self) -> BTreeSet<(ModulePath, String, String)> {
        let mut edges = BTreeSet::new();
        for (from, path) in &self.uses {
            let to = self.module_of(path);
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(user), Some(used)) = (from.get(common), to.get(common)) {
                edges.insert((from[..common].to_vec(), user.clone(), used.clone()));
            }
        }
        edges
    }

    /// Returns the module with the longest path that is a prefix of `path`.
    fn module_of(&self, path: &[String]) -> ModulePath {
        (0..=path.len())
            .rev()
            .map(|length| path[..length].to_vec())
            .find(|module| self.modules.contains(module))
            .unwrap_or_default()
    }
}

/// Returns a module's file and the folder of its submodules.
fn module_file(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let inner = folder.join(name);
    let nested = inner.join("mod.rs");
    if nested.is_file() { (nested, inner) } else { (folder.join(format!("{name}.rs")), inner) }
}

fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let tokens = list.tokens.to_string();
                tokens == "test"
                    || tokens.starts_with("any (test")
                    || tokens.starts_with("all (test")
            })
    })
}

/// Collector of the paths that one module uses, relative to the crate root.
struct UsedPaths {
    module: ModulePath,
    paths: Vec<ModulePath>,
}

impl UsedPaths {
    fn add(&mut self, segments: &[String]) {
        let mut path = match segments.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.module.clone(),
            _ => return,
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => {
                    path.pop();
                }
                name => path.push(name.to_owned()),
            }
        }
        self.paths.push(path);
    }

    fn add_tree(&mut self, prefix: &[String], tree: &UseTree) {
        let with = |name: String| [prefix, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&with(path.ident.to_string()), &path.tree),
            UseTree::Name(name) => self.add(&with(name.ident.to_string())),
            UseTree::Rename(name) => self.add(&with(name.ident.to_string())),
            UseTree::Glob(_) => self.add(prefix),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_tree(prefix, tree));
            }
        }
    }
}

impl<'ast> Visit<'ast> for UsedPaths {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if !is_test_only(&item.attrs) {
            self.add_tree(&[], &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        self.add(&segments);
        visit::visit_path(self, path);
    }

    // Submodules are read separately.
    fn visit_item_mod(&mut self, _: &'ast ItemMod) {}
}
