// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel builds: out of tree, incremental, cached, and reproducible.
//!
//! ```text
//! CACHE/objects/KEY/   objects of one source, version, configuration and toolchain
//! CACHE/kernels/KEY/   Image, System.map, config, tree, build.log, vmlinux if it has debug information;
//!                      complete if it exists
//! ```
//!
//! The key of a kernel is the hash of its inputs: Git tree, configuration fragments, compiler and
//! its version, variables of `make`. All trees of one source are built in the same directory, so
//! `make` compiles only files that depend on a difference to the tree before.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    command::{Command, CommandError},
    error::LabError,
    in_use,
    kernel::{
        image::Kernel,
        recipe::Recipe,
        sources::Source,
        toolchain::{Toolchain, build_environment, parallel_jobs},
    },
    options::{BuildOptions, Paths},
    shell::{self, Shell, partial_path, sha256},
    values::{BuildSetting, PageSize},
};

#[derive(Debug)]
pub struct KernelBuilder<'a> {
    shell: Shell,
    cache: &'a Path,
    source: &'a Source,
    options: &'a BuildOptions,
    /// Configuration fragments; later fragments take precedence.
    fragments: Vec<String>,
    page_size: PageSize,
}

/// One kernel to build: its recipe and everything that its key depends on.
#[derive(Debug)]
pub struct Build<'a> {
    pub recipe: &'a Recipe,
    toolchain: Toolchain,
    pub fragment: String,
    /// Base page size that the fragments set.
    pub page_size: PageSize,
    /// Hash of configuration fragments and variables of `make`.
    settings: String,
    objects: PathBuf,
    /// Directory of the kernel in the cache.
    directory: PathBuf,
}

impl Build<'_> {
    /// Reports whether the cache contains the kernel. An empty image is one that a power loss has left.
    pub fn is_done(&self) -> bool {
        self.image().metadata().is_ok_and(|image| image.is_file() && image.len() > 0)
    }

    /// Returns the path of the image in the cache.
    pub fn image(&self) -> PathBuf {
        self.directory.join("Image")
    }

    /// Returns the first lines of the compiler's and the linker's `--version`.
    pub fn compiler(&self) -> &str {
        &self.toolchain.version
    }

    /// Returns the hash of configuration fragments and variables of `make`.
    pub fn settings(&self) -> &str {
        &self.settings
    }
}

impl<'a> KernelBuilder<'a> {
    /// Returns a builder for a source, and reads the configuration fragments.
    pub fn new(
        shell: Shell,
        paths: &'a Paths,
        source: &'a Source,
        options: &'a BuildOptions,
    ) -> Result<Self, LabError> {
        let own = |name: &str| paths.linux.join("config").join(name);
        let mut files = vec![own("lab.config")];
        files.extend(options.debug_kernel.then(|| own("debug.config")));
        files.extend(options.fragments.iter().cloned());
        let read = |path: &PathBuf| Ok(String::from_utf8_lossy(&shell::read(path)?).into_owned());
        let fragments = files.iter().map(read).collect::<Result<_, CommandError>>()?;
        let page_size = options.page_size()?;
        Ok(Self { shell, cache: &paths.cache, source, options, fragments, page_size })
    }

    /// Returns the build of a recipe.
    pub fn plan<'r>(&self, recipe: &'r Recipe) -> Result<Build<'r>, LabError> {
        let mut fragments = self.fragments.clone();
        fragments.push(self.page_size.fragment().to_owned());
        let mut variables = self.options.variables.clone();
        for setting in &recipe.settings {
            match setting {
                BuildSetting::Config(line) => fragments.push(line.clone()),
                BuildSetting::Make(variable) => variables.push(variable.clone()),
            }
        }
        let toolchain = Toolchain::new(self.shell, &variables)?;
        let fragment: String =
            fragments.iter().map(|text| format!("{}\n", text.trim_end())).collect();
        let version = self.source.version(&recipe.tree)?;
        let version = version.map_or_else(String::new, |version| version.to_string());
        let settings = format!("{variables:?}\n{fragment}");
        let inputs = format!("{}\n{settings}", toolchain.version);
        let key = |scope: &str| sha256(format!("{scope}\n{inputs}").as_bytes())[..16].to_owned();
        let source = self.source.repository.git_dir().display();
        let objects = self.cache.join("objects").join(key(&format!("{source} {version}")));
        let directory = self.cache.join("kernels").join(key(&recipe.tree.to_string()));
        let settings = sha256(settings.as_bytes())[..16].to_owned();
        let page_size = PageSize::of_config(&fragment).unwrap_or_default();
        Ok(Build { recipe, toolchain, fragment, page_size, settings, objects, directory })
    }

    /// Builds a kernel, unless it is cached. Returns the kernel and messages about the configuration
    /// symbols that differ from the fragments.
    pub fn build(&self, build: &Build<'_>) -> Result<(Kernel, Vec<String>), LabError> {
        let recipe = build.recipe;
        let failed = |source| {
            let message = format!("cannot build the kernel '{}'", recipe.name);
            LabError::Failed { message, source }
        };
        if !build.is_done() {
            self.compile(build).map_err(failed)?;
        } else if !self.shell.is_dry_run() {
            in_use::touch(&build.directory);
        }
        let image = build.directory.join("Image");
        if self.shell.is_dry_run() && !image.is_file() {
            let mut planned = Kernel::placeholder(recipe.name.clone(), image);
            planned.page_size = build.page_size;
            planned.describe(recipe, &build.toolchain);
            return Ok((planned, Vec::new()));
        }
        let config = shell::read(&build.directory.join("config")).map_err(failed)?;
        let config = String::from_utf8_lossy(&config);
        let mismatches = mismatches(&build.fragment, &config);
        let required: Vec<&str> = mismatches
            .iter()
            .map(|(symbol, _)| symbol.as_str())
            .filter(|symbol| {
                REQUIRED_SYMBOLS.contains(symbol) || *symbol == build.page_size.symbol()
            })
            .collect();
        if !required.is_empty() {
            return Err(LabError::Unusable(format!(
                "the configuration of this source lacks {}, which the lab requires: see \
                 stage2/linux/config/lab.config and the dependencies of these symbols",
                required.join(", ")
            )));
        }
        refuse_ineffective(recipe, &mismatches)?;
        let mut kernel = Kernel::open(recipe.name.clone(), &image).map_err(failed)?;
        kernel.describe(recipe, &build.toolchain);
        Ok((kernel, mismatches.into_iter().map(|(_, message)| message).collect()))
    }

    fn compile(&self, build: &Build<'_>) -> Result<(), CommandError> {
        let checkout = self.source.repository.switch_to(&build.recipe.tree)?;
        let was_built = build.objects.join("vmlinux").is_file();
        let compiled = self.make_image(build, &checkout.path);
        match compiled {
            // Objects of another tree may be unusable: the kernel's build does not track everything.
            Err(_) if was_built && !self.shell.is_dry_run() => {
                self.shell.remove_dir(&build.objects)?;
                self.make_image(build, &checkout.path)?;
            }
            result => result?,
        }
        self.store(build)
    }

    fn make_image(&self, build: &Build<'_>, tree: &Path) -> Result<(), CommandError> {
        let shell = self.shell;
        let objects = &build.objects;
        let log = objects.join("build.log");
        let make = |task: &str, arguments: &[&str]| {
            let make = build.toolchain.make(task, tree);
            make.arg(format!("O={}", objects.display())).log(&log).args(arguments)
        };
        shell.create_dir(objects)?;
        if !shell.is_dry_run() {
            in_use::touch(objects);
            let _ = fs::remove_file(&log);
        }
        configure(shell, (&build.toolchain, tree), objects, &build.fragment, &log)?;
        shell.run(&make("compiling", &[&format!("-j{}", parallel_jobs()), "Image"]))
    }

    /// Copies the results of a build into the cache, atomically.
    fn store(&self, build: &Build<'_>) -> Result<(), CommandError> {
        let shell = self.shell;
        let partial = partial_path(&build.directory);
        shell.remove_dir(&partial)?;
        shell.create_dir(&partial)?;
        for (from, to) in [
            ("arch/arm64/boot/Image", "Image"),
            ("System.map", "System.map"),
            (".config", "config"),
            ("build.log", "build.log"),
        ] {
            shell.copy(&build.objects.join(from), &partial.join(to))?;
        }
        let config = fs::read_to_string(build.objects.join(".config")).unwrap_or_default();
        if parse_config(&config).get("CONFIG_DEBUG_INFO") == Some(&"y") {
            shell.copy(&build.objects.join("vmlinux"), &partial.join("vmlinux"))?;
        }
        shell.write(&partial.join("tree"), build.recipe.tree.to_string())?;
        shell.write(&partial.join("origin"), build.recipe.origin())?;
        shell.remove_dir(&build.directory)?;
        shell.rename(&partial, &build.directory)
    }
}

/// Writes the configuration of an object directory: `allnoconfig` with a fragment.
pub fn configure(
    shell: Shell,
    (toolchain, tree): (&Toolchain, &Path),
    objects: &Path,
    fragment: &str,
    log: &Path,
) -> Result<(), CommandError> {
    let make = |target: &str| {
        let make = toolchain.make("configuring", tree);
        make.arg(format!("O={}", objects.display())).log(log).arg(target)
    };
    let file = objects.join("granule.config");
    shell.write(&file, fragment)?;
    shell.run(&make("allnoconfig"))?;
    let merge = Command::new("merging the configuration", "sh")
        .arg(tree.join("scripts/kconfig/merge_config.sh"))
        .without_envs(build_environment())
        .args(["-m", "-O"])
        .arg(objects)
        .arg(objects.join(".config"))
        .arg(&file)
        .directory(objects)
        .log(log);
    shell.run(&merge)?;
    shell.run(&make("olddefconfig"))
}

/// Configuration symbols without which the host cannot boot, run the test or send its report.
const REQUIRED_SYMBOLS: [&str; 13] = [
    "CONFIG_KVM",
    "CONFIG_VIRTUALIZATION",
    "CONFIG_SMP",
    "CONFIG_BLK_DEV_INITRD",
    "CONFIG_BINFMT_ELF",
    "CONFIG_SERIAL_AMBA_PL011_CONSOLE",
    "CONFIG_PRINTK",
    "CONFIG_DEVTMPFS",
    "CONFIG_PROC_FS",
    "CONFIG_SYSFS",
    "CONFIG_TMPFS",
    "CONFIG_HUGETLBFS",
    "CONFIG_TRANSPARENT_HUGEPAGE",
];

/// Configuration symbol that differs from the fragments, and a message about it.
pub type ConfigMismatch = (String, String);

/// Refuses a symbol of a variant that the configuration of the source does not accept.
fn refuse_ineffective(recipe: &Recipe, mismatches: &[ConfigMismatch]) -> Result<(), LabError> {
    let lines = recipe.settings.iter().filter_map(|setting| match setting {
        BuildSetting::Config(line) => Some(line.as_str()),
        BuildSetting::Make(_) => None,
    });
    let lines: Vec<&str> = lines.collect();
    let requested = lines.join("\n");
    let symbols = parse_config(&requested);
    match mismatches.iter().find(|(symbol, _)| symbols.contains_key(symbol.as_str())) {
        None => Ok(()),
        Some((symbol, message)) => Err(LabError::Unusable(format!(
            "--variant {symbol} has no effect, because {message}: set the symbols on which it \
             depends with --config, or omit it"
        ))),
    }
}

/// Returns the symbols whose values in `config` and in the fragment differ.
pub fn mismatches(fragment: &str, config: &str) -> Vec<ConfigMismatch> {
    let requested = parse_config(fragment);
    let actual = parse_config(config);
    let mismatch = |(symbol, requested): (&str, &str)| {
        let found = actual.get(symbol).copied();
        if found.unwrap_or("n") == requested {
            return None;
        }
        let message = match found {
            Some(actual) => format!("{symbol} is {actual} instead of {requested}"),
            // Kconfig writes a line for each symbol that it offers.
            None => format!(
                "the configuration lacks {symbol}: the source does not offer it, or what it depends on \
                 is not set"
            ),
        };
        Some((symbol.to_owned(), message))
    };
    requested.into_iter().filter_map(mismatch).collect()
}

/// Parses `CONFIG_X=value`, and `# CONFIG_X is not set` as `n`.
fn parse_config(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| match line.strip_prefix("# ") {
            Some(comment) => Some((comment.strip_suffix(" is not set")?, "n")),
            None => line.split_once('='),
        })
        .filter(|(symbol, _)| symbol.starts_with("CONFIG_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::git::TreeId;

    #[test]
    fn symbols_that_differ_from_the_fragments_are_found() {
        let lab = "# a remark\nCONFIG_KVM=y\nCONFIG_SMP=y\nCONFIG_NR_CPUS=128\nCONFIG_NEW=y\n\
                   # CONFIG_OLD is not set\n";
        let debug = "# CONFIG_SMP is not set\n";
        let config = "CONFIG_NR_CPUS=64\nCONFIG_OTHER=y\n# CONFIG_KVM is not set\n";

        let found = mismatches(&[lab, debug].concat(), config);

        let expected = [
            ("CONFIG_KVM", "CONFIG_KVM is n instead of y"),
            (
                "CONFIG_NEW",
                "the configuration lacks CONFIG_NEW: the source does not offer it, or what it depends on \
                 is not set",
            ),
            ("CONFIG_NR_CPUS", "CONFIG_NR_CPUS is 64 instead of 128"),
        ];
        assert_eq!(found, expected.map(|(symbol, text)| (symbol.to_owned(), text.to_owned())));
        assert!(REQUIRED_SYMBOLS.contains(&"CONFIG_KVM"));
        assert!(!REQUIRED_SYMBOLS.contains(&"CONFIG_NR_CPUS"));
    }

    #[test]
    fn a_variant_without_effect_is_refused() {
        let settings = vec![BuildSetting::Config("CONFIG_PREEMPT=y".to_owned())];
        let recipe = Recipe { settings, ..Recipe::of_base(TreeId::placeholder()) };
        let mismatch = |symbol: &str| vec![(symbol.to_owned(), format!("{symbol} is n"))];

        let error = refuse_ineffective(&recipe, &mismatch("CONFIG_PREEMPT")).unwrap_err();

        assert!(error.to_string().contains("--variant CONFIG_PREEMPT has no effect"), "{error}");
        refuse_ineffective(&recipe, &mismatch("CONFIG_OTHER")).unwrap();
    }
}
