//! The structure of `src/`: every file is a module, imports point to lower layers only, no modules import each other in a circle, tests
//! are in the files that CONTRIBUTING.md names, and the member crates export nothing that is not used. The sources are parsed, not
//! searched as text.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// The crates in folders of `src/`, each named `stowage_FOLDER`. Here each is the module FOLDER of one tree.
const MEMBERS: [&str; 5] = ["model", "api", "planner", "runtime", "cloud"];
/// Layers of `src/lib.rs`, lowest first; of the crate `runtime`, each module by itself. A module may import modules of lower layers,
/// and of its own folder.
const LAYERS: [&[&str]; 7] = [
    &["model", "sync"],
    &["api"],
    &["planner", "webhook", "extender"],
    &["state"],
    &["cloud", "decisions"],
    &["controllers", "server"],
    &["cli"],
];
/// Modules that the layers with I/O may import, and that import the lowest layer only.
const SHARED: [&str; 2] = ["telemetry", "clock"];
/// The modules that may import [`SHARED`]; all others are pure.
const IMPURE: [&str; 6] = ["cloud", "controllers", "server", "cli", "telemetry", "clock"];

type ModulePath = Vec<String>;

/// One module, in a file of its own or inline.
#[derive(Default)]
struct Module {
    /// Paths that non-test code of the module names, absolute from the crate root, items included.
    names: BTreeSet<ModulePath>,
    /// `pub use`: the exported name and the absolute path of the item.
    reexports: BTreeMap<String, ModulePath>,
    /// How often each identifier occurs in non-test code, imports left out.
    identifiers: BTreeMap<String, usize>,
    /// Names of the public constants, functions and types among them, once per definition.
    public: Vec<String>,
}

struct Crate {
    modules: BTreeMap<ModulePath, Module>,
    files: BTreeSet<PathBuf>,
    attributes_with_path: Vec<PathBuf>,
    long_inline_tests: Vec<String>,
}

static CRATE: LazyLock<Crate> = LazyLock::new(Crate::read);

/// Inline `mod tests` beyond this many lines belong in `foo/tests.rs`.
const INLINE_TEST_LINES: usize = 150;

fn source_root() -> PathBuf {
    Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for tests")).join("src")
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && attribute.parse_args::<syn::Ident>().is_ok_and(|ident| ident == "test")
    })
}

impl Crate {
    fn read() -> Self {
        let mut found = Self {
            modules: BTreeMap::new(),
            files: BTreeSet::new(),
            attributes_with_path: Vec::new(),
            long_inline_tests: Vec::new(),
        };
        found.read_file(&source_root().join("lib.rs"), Vec::new(), false);
        for member in MEMBERS {
            found.read_file(&source_root().join(member).join("lib.rs"), vec![member.to_owned()], false);
        }
        found.read_file(&source_root().join("test_objects/lib.rs"), vec!["test_objects".to_owned()], true);
        found
    }

    fn read_file(&mut self, file: &Path, path: ModulePath, test: bool) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.files.insert(file.to_path_buf());
        let folder = match file.file_name().and_then(|name| name.to_str()) {
            Some("mod.rs" | "lib.rs") => file.parent().unwrap().to_path_buf(),
            _ => file.with_extension(""),
        };
        let lines: Vec<&str> = text.lines().collect();
        self.read_items(&syntax.items, file, &folder, path, test, &lines);
    }

    fn read_items(
        &mut self,
        items: &[syn::Item],
        file: &Path,
        folder: &Path,
        path: ModulePath,
        test: bool,
        lines: &[&str],
    ) {
        let mut names = Names { module: path.clone(), found: Module::default() };
        for item in items {
            if let syn::Item::Mod(module) = item {
                let mut child = path.clone();
                child.push(module.ident.to_string());
                let test = test || is_test(&module.attrs);
                if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
                    self.attributes_with_path.push(file.to_path_buf());
                }
                if let Some((_, items)) = &module.content {
                    if test && module.ident == "tests" {
                        self.measure(file, &module.ident.to_string(), lines);
                    }
                    self.read_items(items, file, &folder.join(module.ident.to_string()), child, test, lines);
                } else {
                    let flat = folder.join(format!("{}.rs", module.ident));
                    let nested = folder.join(module.ident.to_string()).join("mod.rs");
                    self.read_file(if flat.exists() { &flat } else { &nested }, child, test);
                }
            } else if !test && !item_is_test(item) {
                names.visit_item(item);
            }
        }
        if !test {
            self.modules.insert(path, names.found);
        }
    }

    fn measure(&mut self, file: &Path, name: &str, lines: &[&str]) {
        let start = lines.iter().position(|line| line.starts_with(&format!("mod {name} {{")));
        let length = start.map_or(0, |start| lines[start..].iter().take_while(|line| **line != "}").count());
        if length > INLINE_TEST_LINES {
            self.long_inline_tests
                .push(format!("{}: {length} lines", file.strip_prefix(source_root()).unwrap_or(file).display()));
        }
    }

    /// The module that a path names: re-exports are followed to where an item is defined.
    fn defining_module(&self, path: &[String]) -> Option<ModulePath> {
        let mut path = path.to_vec();
        for _ in 0..8 {
            let known = (0..=path.len()).rev().find(|length| self.modules.contains_key(&path[..*length]))?;
            let module = &self.modules[&path[..known]];
            let Some(target) = path.get(known).and_then(|name| module.reexports.get(name)) else {
                return Some(path[..known].to_vec());
            };
            path = target.iter().chain(&path[known + 1..]).cloned().collect();
        }
        None
    }

    /// Which modules each module imports.
    fn imports(&self) -> BTreeMap<ModulePath, BTreeSet<ModulePath>> {
        let target = |name: &ModulePath| self.defining_module(name).filter(|module| !module.is_empty());
        let of = |module: &Module, own: &ModulePath| {
            module.names.iter().filter_map(target).filter(|target| target != own).collect()
        };
        self.modules.iter().map(|(path, module)| (path.clone(), of(module, path))).collect()
    }
}

fn item_is_test(item: &syn::Item) -> bool {
    match item {
        syn::Item::Fn(item) => is_test(&item.attrs),
        syn::Item::Impl(item) => is_test(&item.attrs),
        syn::Item::Use(item) => is_test(&item.attrs),
        syn::Item::Struct(item) => is_test(&item.attrs),
        syn::Item::Const(item) => is_test(&item.attrs),
        _ => false,
    }
}

/// Collects the paths that a module names.
struct Names {
    module: ModulePath,
    found: Module,
}

impl Names {
    /// The absolute path of a path that starts with a member crate, `crate`, `self` or `super`.
    fn absolute(&self, segments: &[String]) -> Option<ModulePath> {
        let mut rest = segments;
        let own = self.module.first().filter(|first| MEMBERS.contains(&first.as_str()));
        let mut path = match segments.first()?.as_str() {
            "crate" => own.cloned().into_iter().collect(),
            "self" | "super" => self.module.clone(),
            other => vec![member(other)?.to_owned()],
        };
        if rest[0] != "super" {
            rest = &rest[1..];
        }
        while rest.first().is_some_and(|segment| segment == "super") {
            path.pop();
            rest = &rest[1..];
        }
        path.extend(rest.iter().cloned());
        Some(path)
    }

    fn leaves(prefix: &[String], tree: &syn::UseTree, out: &mut Vec<(String, ModulePath)>) {
        match tree {
            syn::UseTree::Path(path) => {
                let prefix: ModulePath = prefix.iter().cloned().chain([path.ident.to_string()]).collect();
                Self::leaves(&prefix, &path.tree, out);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| Self::leaves(prefix, tree, out)),
            syn::UseTree::Glob(_) => out.push(("*".into(), prefix.to_vec())),
            syn::UseTree::Name(name) if name.ident == "self" => {
                out.push((prefix.last().cloned().unwrap_or_default(), prefix.to_vec()));
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                out.push((name.clone(), prefix.iter().cloned().chain([name]).collect()));
            }
            syn::UseTree::Rename(rename) => {
                let path = prefix.iter().cloned().chain([rename.ident.to_string()]).collect();
                out.push((rename.rename.to_string(), path));
            }
        }
    }

    fn count(&mut self, ident: &proc_macro2::Ident) {
        *self.found.identifiers.entry(ident.to_string()).or_default() += 1;
    }

    fn define(&mut self, visibility: &syn::Visibility, ident: &syn::Ident) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.found.public.push(ident.to_string());
        }
    }

    /// The constants of the macro `events!`: `NAME = …;`.
    fn declared_events(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for pair in tokens.windows(2) {
            if let [TokenTree::Ident(name), TokenTree::Punct(equals)] = pair
                && equals.as_char() == '='
            {
                self.found.public.push(name.to_string());
            }
        }
    }

    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) if starts_path(&first.to_string()) => {
                    let mut path = vec![first.to_string()];
                    while let [TokenTree::Punct(a), TokenTree::Punct(b), TokenTree::Ident(next), ..] = &tokens[at + 1..]
                    {
                        if a.as_char() != ':' || b.as_char() != ':' {
                            break;
                        }
                        self.count(next);
                        path.push(next.to_string());
                        at += 3;
                    }
                    if path.len() > 1 {
                        self.found.names.extend(self.absolute(&path));
                    }
                }
                TokenTree::Ident(ident) => self.count(ident),
                TokenTree::Literal(literal) if !literal.to_string().contains(' ') => {
                    for word in literal.to_string().split(|c: char| !c.is_alphanumeric() && c != '_') {
                        *self.found.identifiers.entry(word.to_owned()).or_default() += 1;
                    }
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut leaves = Vec::new();
        Self::leaves(&[], &item.tree, &mut leaves);
        for (name, path) in leaves {
            let Some(path) = self.absolute(&path) else { continue };
            if matches!(item.vis, syn::Visibility::Inherited) {
                self.found.names.insert(path);
            } else {
                self.found.reexports.insert(name, path);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: ModulePath = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 {
            self.found.names.extend(self.absolute(&segments));
        }
        visit::visit_path(self, path);
    }

    fn visit_ident(&mut self, ident: &'ast syn::Ident) {
        self.count(ident);
    }

    /// Attributes name functions and types, also in texts: `skip_serializing_if = "is_absent"`.
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Const(item) => self.define(&item.vis, &item.ident),
            syn::Item::Enum(item) => self.define(&item.vis, &item.ident),
            syn::Item::Fn(item) => self.define(&item.vis, &item.sig.ident),
            syn::Item::Struct(item) => self.define(&item.vis, &item.ident),
            syn::Item::Trait(item) => self.define(&item.vis, &item.ident),
            syn::Item::Type(item) => self.define(&item.vis, &item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        if item.path.is_ident("events") {
            self.declared_events(item.tokens.clone());
        }
        self.tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.define(&item.vis, &item.sig.ident);
            visit::visit_impl_item_fn(self, item);
        }
    }
}

/// The folder of a member crate.
fn member(name: &str) -> Option<&str> {
    name.strip_prefix("stowage_").filter(|folder| MEMBERS.contains(folder))
}

fn starts_path(name: &str) -> bool {
    ["crate", "self", "super"].contains(&name) || member(name).is_some()
}

/// The public names of member crates that occur nowhere but in their own definitions. A name that also means something else is not
/// found.
fn unused<'a>(modules: impl Iterator<Item = (&'a ModulePath, &'a Module)> + Clone) -> Vec<String> {
    let (mut occurrences, mut definitions) = (BTreeMap::<&str, usize>::new(), BTreeMap::<&str, usize>::new());
    for (_, module) in modules.clone() {
        for (name, count) in &module.identifiers {
            *occurrences.entry(name).or_default() += count;
        }
        for name in &module.public {
            *definitions.entry(name).or_default() += 1;
        }
    }
    let of_members = modules.filter(|(path, _)| path.first().is_some_and(|first| MEMBERS.contains(&first.as_str())));
    of_members
        .flat_map(|(path, module)| module.public.iter().map(move |name| (path, name)))
        .filter(|(_, name)| occurrences.get(name.as_str()) <= definitions.get(name.as_str()))
        .map(|(path, name)| format!("{}::{name}", path.join("::")))
        .collect()
}

/// The name of a module in [`LAYERS`] and [`SHARED`].
fn top_level(module: &[String]) -> Option<&str> {
    let of_runtime = module.first().is_some_and(|first| first == "runtime");
    module.get(usize::from(of_runtime)).map(String::as_str)
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// Whether code of one top-level module may import another top-level module.
fn may_import(from: &str, to: &str) -> bool {
    if from == to {
        return true;
    }
    if SHARED.contains(&to) {
        return IMPURE.contains(&from);
    }
    if SHARED.contains(&from) {
        return layer(to) == Some(0);
    }
    layer(from) > layer(to)
}

/// Groups of modules that import each other in a circle (Tarjan's strongly connected components of more than one module).
fn circles(imports: &BTreeMap<ModulePath, BTreeSet<ModulePath>>) -> Vec<Vec<String>> {
    let reachable = |from: &ModulePath| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = open.pop() {
            for next in imports.get(&module).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(next.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
        imports.keys().map(|module| (module, reachable(module))).collect();
    let mut out = BTreeSet::new();
    for (module, reaches) in &reached {
        let circle: Vec<String> = reaches
            .iter()
            .filter(|other| reached.get(*other).is_some_and(|back| back.contains(*module)))
            .map(|other| other.join("::"))
            .collect();
        if !circle.is_empty() {
            out.insert(circle);
        }
    }
    out.into_iter().collect()
}

#[test]
fn every_source_file_is_a_module() {
    let (mut folders, mut orphans) = (vec![source_root()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !CRATE.files.contains(&path)
                && !path.ends_with("main.rs")
            {
                orphans.push(path);
            }
        }
    }
    assert!(CRATE.files.len() > 100, "only {} files were read", CRATE.files.len());
    assert!(orphans.is_empty(), "no module declares {orphans:#?}");
}

#[test]
fn imports_point_to_lower_layers_only() {
    let imports = CRATE.imports();
    let mut wrong = BTreeSet::new();
    let mut checked = 0;
    for (module, targets) in &imports {
        // `parts` re-exports for tests and benches; nothing of the crate imports it.
        let Some(from) = top_level(module).filter(|from| *from != "parts") else { continue };
        assert!(layer(from).is_some() || SHARED.contains(&from), "{from} has no layer in this test");
        for target in targets {
            checked += 1;
            if !top_level(target).is_some_and(|to| may_import(from, to)) {
                wrong.insert(format!("{} imports {}", module.join("::"), target.join("::")));
            }
        }
    }
    assert!(checked > 300, "only {checked} imports were read");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let circles = circles(&CRATE.imports());
    assert!(circles.is_empty(), "{circles:#?}");
}

/// What the compiler finds inside one crate. `tests/` and `benches/` are users, too.
#[test]
fn every_public_item_of_a_member_crate_is_used() {
    let mut users = Names { module: vec!["parts".into()], found: Module::default() };
    let package = source_root().parent().unwrap().to_path_buf();
    let mut folders = vec![package.join("tests"), package.join("benches")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                users.visit_file(&syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap());
            }
        }
    }
    let own = vec!["parts".to_owned()];
    let unused = unused(CRATE.modules.iter().chain([(&own, &users.found)]));
    assert!(unused.is_empty(), "delete {unused:#?}");
}

#[test]
fn short_tests_are_inline_and_long_tests_in_a_tests_file() {
    assert!(CRATE.attributes_with_path.is_empty(), "#[path] in {:#?}", CRATE.attributes_with_path);
    assert!(CRATE.long_inline_tests.is_empty(), "move to foo/tests.rs: {:#?}", CRATE.long_inline_tests);
}

#[test]
fn codes_and_texts_of_aws_errors_are_compared_in_one_file() {
    let ec2 = source_root().join("cloud/ec2");
    let errors = ec2.join("aws/errors.rs");
    let is_test = |path: &Path| path.components().any(|part| part.as_os_str().to_string_lossy().contains("tests"));
    let compares = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let comparisons = ["error.code ==", "error.code !=", ".message.contains(", ".message.to_lowercase("];
        comparisons.iter().any(|comparison| text.contains(comparison))
    };
    let files = CRATE.files.iter().filter(|path| path.starts_with(&ec2) && !is_test(path) && compares(path));
    assert_eq!(files.collect::<Vec<_>>(), [&errors]);
}

#[test]
fn a_circle_a_wrong_layer_and_a_reexport_are_recognized() {
    let path = |text: &str| text.split("::").map(str::to_owned).collect::<ModulePath>();
    let module = |names: &[&str], reexports: &[(&str, &str)]| Module {
        names: names.iter().map(|name| path(name)).collect(),
        reexports: reexports.iter().map(|(name, target)| ((*name).to_owned(), path(target))).collect(),
        ..Module::default()
    };
    let read = Crate {
        modules: BTreeMap::from([
            (Vec::new(), Module::default()),
            (path("a"), module(&["b::Item"], &[("Shown", "a::inner::Shown")])),
            (path("a::inner"), module(&[], &[])),
            (path("b"), module(&["a::Shown", "c"], &[])),
            (path("c"), module(&["a::own"], &[])),
        ]),
        files: BTreeSet::new(),
        attributes_with_path: Vec::new(),
        long_inline_tests: Vec::new(),
    };
    let imports = read.imports();
    assert!(imports[&path("b")].contains(&path("a::inner")), "a re-export leads to the module that defines the item");
    assert_eq!(circles(&imports), [["a", "b", "c"]]);
    assert!(may_import("controllers", "model") && may_import("cloud", "telemetry"));
    assert!(!may_import("model", "api") && !may_import("planner", "clock") && !may_import("planner", "webhook"));
}

#[test]
fn an_unused_public_item_is_recognized() {
    let read = |path: &str, text: &str| {
        let mut names = Names { module: vec![path.to_owned()], found: Module::default() };
        names.visit_file(&syn::parse_str(text).unwrap());
        (names.module, names.found)
    };
    let model = "pub const USED: u8 = 1; pub const IMPORTED: u8 = 2; fn own() {} pub fn called() {} pub struct Named;
        events! { EMITTED = \"A\"; SILENT = \"B\"; }";
    let user =
        "use stowage_model::{IMPORTED, USED}; fn f() { called(); emit!(EMITTED, USED); let n: Option<Named> = None; }";
    let modules = [read("model", model), read("cloud", user)];
    let found = unused(modules.iter().map(|(path, module)| (path, module)));
    assert_eq!(found, ["model::IMPORTED", "model::SILENT"]);
}
