// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel builds: out of tree, cached, and reproducible.
//!
//! ```text
//! CACHE/objects/KEY/   objects of the base
//! CACHE/kernels/KEY/   Image, System.map, config, build.log; complete if it exists
//! ```
//!
//! A key is the hash of the inputs: source, patches, configuration fragments, compiler. The build
//! of a patched kernel starts with a copy of the base's objects. [`worktree`] restores the times of
//! files when it reverts patches, so `make` compiles only files that depend on patched ones.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    LabError,
    command::{Command, CommandError},
    kernel::{
        image::Kernel,
        series::{Patch, PatchStack},
        sources::Tree,
        worktree,
    },
    shell::{self, Shell, partial_path, sha256},
};

/// Prefix of the cross compiler, and of Debian's native compiler.
const CROSS_COMPILE: &str = "aarch64-linux-gnu-";

#[derive(Debug)]
pub struct KernelBuilder<'a> {
    shell: Shell,
    cache: &'a Path,
    tree: &'a Tree,
    fragments: Vec<PathBuf>,
    fragment_texts: Vec<String>,
    compiler: String,
}

impl<'a> KernelBuilder<'a> {
    /// Returns a builder for a tree and configuration fragments. Later fragments take precedence.
    pub fn new(
        shell: Shell,
        cache: &'a Path,
        tree: &'a Tree,
        fragments: Vec<PathBuf>,
    ) -> Result<Self, CommandError> {
        let fragment_texts = fragments
            .iter()
            .map(|path| Ok(String::from_utf8_lossy(&shell::read(path)?).into_owned()))
            .collect::<Result<_, CommandError>>()?;
        let version = Command::new("querying the compiler", format!("{CROSS_COMPILE}gcc"))
            .arg("--version")
            .query();
        let compiler = match version {
            Err(_) if shell.is_dry_run() => String::new(),
            version => version?.lines().next().unwrap_or_default().to_owned(),
        };
        Ok(Self { shell, cache, tree, fragments, fragment_texts, compiler })
    }

    fn cache_key(&self, patches: &[Patch]) -> String {
        let mut inputs = format!("{}\n{}\n", self.tree.id, self.compiler).into_bytes();
        for fragment in &self.fragment_texts {
            inputs.extend(sha256(fragment.as_bytes()).bytes());
        }
        for patch in patches {
            inputs.extend(sha256(&patch.content).bytes());
        }
        sha256(&inputs)[..16].to_owned()
    }

    /// Returns whether the cache contains the kernel of a stack.
    pub fn is_built(&self, stack: &PatchStack) -> bool {
        self.kernel_dir(&stack.patches).join("Image").is_file()
    }

    fn kernel_dir(&self, patches: &[Patch]) -> PathBuf {
        self.cache.join("kernels").join(self.cache_key(patches))
    }

    /// Builds the kernel of a stack, unless it is cached. Returns the kernel and the configuration
    /// symbols that differ from the fragments.
    pub fn build_kernel(
        &self,
        stack: &PatchStack,
    ) -> Result<(Kernel, Vec<ConfigMismatch>), LabError> {
        let failed = |source| {
            let message = format!("cannot build the kernel '{}'", stack.name);
            LabError::Failed { message, source }
        };
        let directory = self.kernel_dir(&stack.patches);
        let image = directory.join("Image");
        if !self.is_built(stack) {
            self.build(&stack.patches).map_err(failed)?;
        }
        let series = Some(stack.series.clone());
        if self.shell.is_dry_run() && !image.is_file() {
            let planned = Kernel::placeholder(stack.name.clone(), image, series);
            return Ok((planned, Vec::new()));
        }
        let config = shell::read(&directory.join("config")).map_err(failed)?;
        let config = String::from_utf8_lossy(&config);
        let mismatches = mismatches(&self.fragment_texts, &config);
        let required: Vec<&str> = mismatches
            .iter()
            .map(|(symbol, _)| symbol.as_str())
            .filter(|symbol| REQUIRED_SYMBOLS.contains(symbol))
            .collect();
        if !required.is_empty() {
            return Err(LabError::Unusable(format!(
                "the configuration of this source lacks {}, which the lab requires: see \
                 stage2/linux/config/lab.config and the dependencies of these symbols",
                required.join(", ")
            )));
        }
        let kernel = Kernel::open(stack.name.clone(), &image, series).map_err(failed)?;
        Ok((kernel, mismatches))
    }

    fn build(&self, patches: &[Patch]) -> Result<(), CommandError> {
        let shell = self.shell;
        let base = self.cache.join("objects").join(self.cache_key(&[]));
        let base_is_built = self.kernel_dir(&[]).join("Image").is_file();
        if patches.is_empty() || !base_is_built || !base.join("vmlinux").is_file() {
            worktree::switch_to(shell, self.tree, &[])?;
            self.compile(&base)?;
            self.store_kernel(&base, &[])?;
        }
        if patches.is_empty() {
            return Ok(());
        }
        let objects = self.cache.join("objects").join("patched");
        shell.remove_dir(&objects)?;
        let copy = Command::new("copying the objects of the base", "cp")
            .args(["-a", "-T"])
            .args([&base, &objects]);
        shell.run(&copy)?;
        worktree::switch_to(shell, self.tree, patches)?;
        let compiled = self.compile(&objects);
        worktree::revert(shell, self.tree)?;
        compiled?;
        self.store_kernel(&objects, patches)?;
        shell.remove_dir(&objects)
    }

    fn compile(&self, objects: &Path) -> Result<(), CommandError> {
        let shell = self.shell;
        let log = objects.join("build.log");
        let make = |task: &str, arguments: &[&str]| {
            make(task, &self.tree.path)
                .arg(format!("O={}", objects.display()))
                .log(&log)
                .args(arguments)
        };
        shell.create_dir(objects)?;
        // This file is written last, so that an interrupted configuration is repeated.
        let configured = objects.join("configured");
        if !configured.is_file() {
            shell.run(&make("configuring", &["allnoconfig"]))?;
            let merge = Command::new("merging the configuration", "sh")
                .arg(self.tree.path.join("scripts/kconfig/merge_config.sh"))
                .args(["-m", "-O"])
                .arg(objects)
                .arg(objects.join(".config"))
                .args(&self.fragments)
                .directory(objects)
                .log(&log);
            shell.run(&merge)?;
            shell.run(&make("configuring", &["olddefconfig"]))?;
            shell.write(&configured, "")?;
        }
        shell.run(&make("compiling", &[&format!("-j{}", parallel_jobs()), "Image"]))
    }

    /// Copies the results of a build into the cache, atomically.
    fn store_kernel(&self, objects: &Path, patches: &[Patch]) -> Result<(), CommandError> {
        let shell = self.shell;
        let directory = self.kernel_dir(patches);
        let partial = partial_path(&directory);
        shell.remove_dir(&partial)?;
        shell.create_dir(&partial)?;
        for (from, to) in [
            ("arch/arm64/boot/Image", "Image"),
            ("System.map", "System.map"),
            (".config", "config"),
            ("build.log", "build.log"),
        ] {
            shell.copy(&objects.join(from), &partial.join(to))?;
        }
        shell.remove_dir(&directory)?;
        shell.rename(&partial, &directory)
    }
}

/// Returns the `make` command for an arm64 kernel tree. Build properties in the image that vary
/// between machines have fixed values.
pub fn make(task: &str, tree: &Path) -> Command {
    Command::new(task, "make")
        .env("KBUILD_BUILD_TIMESTAMP", "2000-01-01")
        .env("KBUILD_BUILD_USER", "granule")
        .env("KBUILD_BUILD_HOST", "lab")
        .env("KBUILD_BUILD_VERSION", "1")
        .env("LOCALVERSION", "")
        .args(["-s", "-C"])
        .arg(tree)
        .arg("ARCH=arm64")
        .arg(format!("CROSS_COMPILE={CROSS_COMPILE}"))
}

/// Returns the number of parallel compilers: one for each CPU.
pub fn parallel_jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Configuration symbols without which the host cannot boot, run the test or send its report.
const REQUIRED_SYMBOLS: [&str; 14] = [
    "CONFIG_KVM",
    "CONFIG_VIRTUALIZATION",
    "CONFIG_SMP",
    "CONFIG_ARM64_4K_PAGES",
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

/// Returns the symbols whose values in `config` and in the fragments differ.
fn mismatches(fragments: &[impl AsRef<str>], config: &str) -> Vec<ConfigMismatch> {
    let requested: BTreeMap<_, _> =
        fragments.iter().flat_map(|fragment| parse_config(fragment.as_ref())).collect();
    let actual = parse_config(config);
    let mismatch = |(symbol, requested): (&str, &str)| {
        let actual = actual.get(symbol).copied().unwrap_or("n");
        let message = format!("{symbol} is {actual} instead of {requested}");
        (actual != requested).then(|| (symbol.to_owned(), message))
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

    #[test]
    fn symbols_that_differ_from_the_fragments_are_found() {
        let lab = "# a remark\nCONFIG_KVM=y\nCONFIG_SMP=y\nCONFIG_NR_CPUS=128\nCONFIG_NEW=y\n";
        let debug = "# CONFIG_SMP is not set\n";
        let config = "CONFIG_NR_CPUS=64\nCONFIG_OTHER=y\n# CONFIG_KVM is not set\n";

        let found = mismatches(&[lab, debug], config);

        let expected = [
            ("CONFIG_KVM", "CONFIG_KVM is n instead of y"),
            ("CONFIG_NEW", "CONFIG_NEW is n instead of y"),
            ("CONFIG_NR_CPUS", "CONFIG_NR_CPUS is 64 instead of 128"),
        ];
        assert_eq!(found, expected.map(|(symbol, text)| (symbol.to_owned(), text.to_owned())));
        assert!(REQUIRED_SYMBOLS.contains(&"CONFIG_KVM"));
        assert!(!REQUIRED_SYMBOLS.contains(&"CONFIG_NR_CPUS"));
    }
}
