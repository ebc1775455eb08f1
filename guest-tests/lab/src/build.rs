// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel builds: out of tree, cached, and the same bytes each time.
//!
//! ```text
//! CACHE/objects/KEY/   the base kernel's objects, kept
//! CACHE/kernels/KEY/   Image, System.map, config, build.log; complete once it is there
//! ```
//!
//! A key is the hash of everything that makes a kernel: source, patches, configuration fragments,
//! compiler. A patched kernel starts from a copy of the base's objects, so that only what the
//! patches touch is compiled: seconds instead of minutes. That copy's sources are newer than its
//! objects exactly where a patch changed them, because patches are taken out with the old times
//! ([`super::worktree`]).

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{
    fragment::{Refused, refused},
    frames::sha256,
    kernel::Kernel,
    series::{Patch, Stack},
    sources::Tree,
    step::{self, Shell, Step, StepError, partial},
    worktree,
};

/// The compiler's prefix. Debian names the native compiler so as well.
pub const CROSS_COMPILE: &str = "aarch64-linux-gnu-";

/// Why a kernel was not built.
#[derive(Debug, Error)]
pub enum BuildError {
    /// A command failed.
    #[error("the kernel '{kernel}' was not built")]
    Step {
        /// Which kernel.
        kernel: String,
        /// What went wrong.
        #[source]
        source: StepError,
    },
    /// A symbol without which the lab is no use was not taken.
    #[error(
        "this source does not take {symbols}, which the lab cannot do without: look at \
         stage2/linux/config/lab.config and at what these symbols depend on"
    )]
    Config {
        /// Which symbols.
        symbols: String,
    },
}

/// What is needed to build from one source.
#[derive(Debug)]
pub struct Builder<'a> {
    shell: Shell,
    cache: &'a Path,
    tree: &'a Tree,
    fragments: Vec<PathBuf>,
    fragment_texts: Vec<String>,
    compiler: String,
}

impl<'a> Builder<'a> {
    /// A builder for a tree and configuration fragments, later ones overriding earlier ones.
    ///
    /// # Errors
    /// A fragment cannot be read, or there is no compiler.
    pub fn new(
        shell: Shell,
        cache: &'a Path,
        tree: &'a Tree,
        fragments: Vec<PathBuf>,
    ) -> Result<Self, StepError> {
        let fragment_texts = fragments
            .iter()
            .map(|path| Ok(String::from_utf8_lossy(&step::read(path)?).into_owned()))
            .collect::<Result<_, StepError>>()?;
        let asked = Step::new("asking for the compiler's version", compiler())
            .arg("--version")
            .ask();
        let compiler = match asked {
            Err(_) if shell.is_dry() => String::new(),
            answer => answer?.lines().next().unwrap_or_default().to_owned(),
        };
        Ok(Self {
            shell,
            cache,
            tree,
            fragments,
            fragment_texts,
            compiler,
        })
    }

    fn key(&self, patches: &[Patch]) -> String {
        let mut all = format!("{}\n{}\n", self.tree.id, self.compiler).into_bytes();
        for fragment in &self.fragment_texts {
            all.extend(sha256(fragment.as_bytes()).bytes());
        }
        for patch in patches {
            all.extend(sha256(&patch.content).bytes());
        }
        sha256(&all)[..16].to_owned()
    }

    /// Whether a stack's kernel lies in the cache.
    pub fn is_built(&self, stack: &Stack) -> bool {
        self.kernel_dir(&stack.patches).join("Image").is_file()
    }

    fn kernel_dir(&self, patches: &[Patch]) -> PathBuf {
        self.cache.join("kernels").join(self.key(patches))
    }

    /// Builds the kernel of a stack, or takes it from the cache, and tells what its configuration
    /// did not take.
    ///
    /// # Errors
    /// A patch does not apply, the compiler refuses, or the configuration is of no use.
    pub fn kernel(&self, stack: &Stack) -> Result<(Kernel, Vec<Refused>), BuildError> {
        let failed = |source| BuildError::Step {
            kernel: stack.name.clone(),
            source,
        };
        let dir = self.kernel_dir(&stack.patches);
        let image = dir.join("Image");
        if !self.is_built(stack) {
            self.build(&stack.patches).map_err(failed)?;
        }
        let series = Some(stack.series.clone());
        if self.shell.is_dry() && !image.is_file() {
            return Ok((
                Kernel::planned(stack.name.clone(), image, series),
                Vec::new(),
            ));
        }
        let config = step::read(&dir.join("config")).map_err(failed)?;
        let config = String::from_utf8_lossy(&config);
        let refused = refused(self.fragment_texts.iter().map(String::as_str), &config);
        let needed: Vec<&str> = refused
            .iter()
            .filter(|refused| refused.needed)
            .map(|refused| refused.symbol.as_str())
            .collect();
        if !needed.is_empty() {
            return Err(BuildError::Config {
                symbols: needed.join(", "),
            });
        }
        let kernel = Kernel::of(stack.name.clone(), &image, series).map_err(failed)?;
        Ok((kernel, refused))
    }

    fn build(&self, patches: &[Patch]) -> Result<(), StepError> {
        let shell = self.shell;
        let base = self.cache.join("objects").join(self.key(&[]));
        let base_done = self.kernel_dir(&[]).join("Image").is_file();
        if patches.is_empty() || !base_done || !base.join("vmlinux").is_file() {
            worktree::switch_to(shell, self.tree, &[])?;
            self.compile(&base)?;
            self.publish(&base, &[])?;
        }
        if patches.is_empty() {
            return Ok(());
        }
        let objects = self.cache.join("objects").join("patched");
        shell.remove_dir(&objects)?;
        let copy = Step::new("copying the base's objects", "cp")
            .args(["-a", "-T"])
            .args([&base, &objects]);
        shell.run(&copy)?;
        worktree::switch_to(shell, self.tree, patches)?;
        let compiled = self.compile(&objects);
        worktree::restore(shell, self.tree)?;
        compiled?;
        self.publish(&objects, patches)?;
        shell.remove_dir(&objects)
    }

    /// Configures, unless that is done, and compiles.
    fn compile(&self, objects: &Path) -> Result<(), StepError> {
        let shell = self.shell;
        let log = objects.join("build.log");
        shell.make_dir(objects)?;
        // Written last: an interrupted configuration is made again.
        let configured = objects.join("configured");
        if !configured.is_file() {
            shell.run(&self.make(objects, "configuring", &log).arg("allnoconfig"))?;
            let merge = Step::new("merging the configuration", "sh")
                .arg(self.tree.path.join("scripts/kconfig/merge_config.sh"))
                .args(["-m", "-O"])
                .arg(objects)
                .arg(objects.join(".config"))
                .args(&self.fragments)
                .dir(objects)
                .log(&log);
            shell.run(&merge)?;
            shell.run(&self.make(objects, "configuring", &log).arg("olddefconfig"))?;
            shell.write(&configured, "")?;
        }
        shell.run(
            &self
                .make(objects, "compiling", &log)
                .arg(format!("-j{}", jobs()))
                .arg("Image"),
        )
    }

    fn make(&self, objects: &Path, what: &str, log: &Path) -> Step {
        make(what, &self.tree.path)
            .arg(format!("O={}", objects.display()))
            .log(log)
    }

    /// Puts what is needed of a build into the cache, whole or not at all.
    fn publish(&self, objects: &Path, patches: &[Patch]) -> Result<(), StepError> {
        let shell = self.shell;
        let dir = self.kernel_dir(patches);
        let partial = partial(&dir);
        shell.remove_dir(&partial)?;
        shell.make_dir(&partial)?;
        for (from, to) in [
            ("arch/arm64/boot/Image", "Image"),
            ("System.map", "System.map"),
            (".config", "config"),
            ("build.log", "build.log"),
        ] {
            shell.copy(&objects.join(from), &partial.join(to))?;
        }
        shell.remove_dir(&dir)?;
        shell.rename(&partial, &dir)
    }
}

/// `make` in a kernel tree, for arm64, with everything fixed that would end up in the image.
pub fn make(what: &str, tree: &Path) -> Step {
    Step::new(what, "make")
        .env("KBUILD_BUILD_TIMESTAMP", "2000-01-01")
        .env("KBUILD_BUILD_USER", "granule")
        .env("KBUILD_BUILD_HOST", "lab")
        .env("KBUILD_BUILD_VERSION", "1")
        .env("LOCALVERSION", "")
        .args(["-s", "-C"])
        .arg(tree)
        .args(["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"])
}

/// How many compilers at a time: one for each CPU.
pub fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn compiler() -> String {
    format!("{CROSS_COMPILE}gcc")
}
