// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages of a host kernel for an arm64 server: the base, and the base with a series.
//!
//! Both kernels have the configuration of the running kernel and differ only in the series. Each is
//! built in its own copy of the source:
//!
//! ```text
//! OUT/plain/linux/    the source of the base
//! OUT/plain/*.deb     its packages
//! OUT/SERIES/…        the same with the series
//! ```

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use clap::ValueEnum;

use crate::{
    command::{Command, CommandError},
    error::LabError,
    kernel::{
        series::{DEFAULT_SERIES, Patch, all_patches},
        sources::{Source, open_base},
        toolchain::parallel_jobs,
    },
    options::{Locations, SourceOptions},
    shell::{self, Shell, absolute},
    values::LinuxVersion,
};

/// Options of `granule lab host-kernel`.
#[derive(Debug, Clone, clap::Args)]
pub struct HostPackages {
    /// Linux version of the base
    #[arg(long, default_value_t = SourceOptions::DEFAULT_BASE, value_name = "VERSION")]
    base: LinuxVersion,
    /// Series to apply
    #[arg(long, default_value = DEFAULT_SERIES, value_name = "NAME")]
    series: String,
    /// Clean tree of the base [default: Debian's source]
    #[arg(long, value_name = "TREE")]
    source: Option<PathBuf>,
    /// Configuration; required unless this machine is arm64 [default: that of the running kernel]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Output directory
    #[arg(long, value_name = "DIR", default_value = "host-kernels")]
    out: PathBuf,
    /// Number of parallel compilers [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Build only this kernel
    #[arg(long = "only", value_name = "KERNEL", value_enum)]
    only_kernel: Option<HostKernel>,
    /// Print the build as shell and execute nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    locations: Locations,
}

/// Variant of the host kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum HostKernel {
    /// The base
    Plain,
    /// The base with the series
    Series,
}

/// Build tools, each with the Debian package if its name differs.
const TOOLS: &str = "make gcc bc flex bison rsync cpio patch perl python3 fakeroot depmod:kmod \
                     dpkg-buildpackage:dpkg-dev";
const CROSS_COMPILER: &str = "aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu";
const HEADERS: [(&str, &str); 2] =
    [("/usr/include/libelf.h", "libelf-dev"), ("/usr/include/openssl/ssl.h", "libssl-dev")];

/// Source tree and log in the directory of a kernel.
const TREE: &str = "linux";
const LOG: &str = "build.log";

impl HostPackages {
    /// Builds the packages and returns their paths.
    ///
    /// # Errors
    /// A requirement is missing, an input is unusable, or a kernel cannot be built.
    pub fn build(&self) -> Result<Vec<PathBuf>, LabError> {
        let shell = Shell::new(self.dry_run);
        let (linux, cache) = (self.locations.linux()?, self.locations.cache()?);
        let patches = all_patches(&linux, self.base, &self.series)?;
        let cross = !cfg!(target_arch = "aarch64");
        if cross && self.config.is_none() {
            return refuse(
                "this machine is not arm64: set the configuration of an arm64 server with --config",
            );
        }
        if !self.dry_run {
            check_tools(cross)?;
        }
        let config = self.configuration()?;
        let _lock = super::lock_cache(shell, &cache)?;
        let source = open_base(shell, &cache, &self.origin())?;
        let out = absolute(&self.out)?;
        shell.create_dir(&out)?;
        let mut packages = Vec::new();
        for (kernel, name, patches) in
            [(HostKernel::Plain, "plain", &[][..]), (HostKernel::Series, &self.series, &patches)]
        {
            if self.only_kernel.is_some_and(|only| only != kernel) {
                continue;
            }
            let directory = out.join(name);
            let tree = directory.join(TREE);
            check_is_of_build(&directory)?;
            shell.remove_dir(&directory)?;
            shell.create_dir(&directory)?;
            copy_source(shell, &source, patches, &tree)?;
            self.compile(shell, (name, &directory), &config, cross)?;
            packages.extend(image_packages(&directory));
        }
        Ok(packages)
    }

    fn configuration(&self) -> Result<(PathBuf, String), LabError> {
        let (path, text) = match &self.config {
            Some(path) => {
                let text = fs::read_to_string(path);
                let text = text.map_err(|e| CommandError::file("read the configuration", path, e));
                (path.clone(), text?)
            }
            None => running_config()?,
        };
        let has = |setting: &str| text.lines().any(|line| line == setting);
        if !has("CONFIG_ARM64=y") {
            return refuse(format!(
                "{} is not an arm64 configuration: set one with --config",
                path.display()
            ));
        }
        if !has("CONFIG_KVM=y") {
            return refuse(format!(
                "{} has no CONFIG_KVM=y: set the configuration of a KVM host with --config",
                path.display()
            ));
        }
        Ok((path, text))
    }

    fn origin(&self) -> SourceOptions {
        SourceOptions {
            base: Some(self.base),
            source: self.source.clone(),
            ..SourceOptions::default()
        }
    }

    /// Configures and builds the packages, without the distribution's signing keys, which are not
    /// public, and without debug information, which takes tens of gigabytes.
    fn compile(
        &self,
        shell: Shell,
        (name, directory): (&str, &Path),
        (config, config_text): &(PathBuf, String),
        cross: bool,
    ) -> Result<(), CommandError> {
        let tree = directory.join(TREE);
        let file = tree.join(".config");
        if config.extension().is_some_and(|e| e == "gz") {
            shell.write(&file, config_text)?;
        } else {
            shell.copy(config, &file)?;
        }
        let log = directory.join(LOG);
        let configure = Command::new("configuring", tree.join("scripts/config"))
            .arg("--file")
            .arg(&file)
            .args(["--set-str", "SYSTEM_TRUSTED_KEYS", ""])
            .args(["--set-str", "SYSTEM_REVOCATION_KEYS", ""])
            .args(["--set-str", "MODULE_SIG_KEY", "certs/signing_key.pem"])
            .args(["--set-str", "LOCALVERSION", &format!("-{name}")])
            .args(["--disable", "LOCALVERSION_AUTO", "--disable", "DEBUG_INFO"])
            .args(["--disable", "DEBUG_INFO_BTF", "--enable", "DEBUG_INFO_NONE"])
            .log(&log);
        shell.run(&configure)?;
        let make = |task: &str, arguments: &[&str]| {
            let make = Command::new(task, "make")
                .arg("-C")
                .arg(&tree)
                .arg("ARCH=arm64")
                .args(cross.then_some("CROSS_COMPILE=aarch64-linux-gnu-"))
                .args(arguments)
                .log(&log);
            shell.run(&make)
        };
        if !shell.is_dry_run() {
            eprintln!("host-kernel: building '{name}'; log: {}", log.display());
        }
        make("configuring", &["olddefconfig"])?;
        let jobs = self.jobs.map_or_else(|| parallel_jobs().to_string(), |jobs| jobs.to_string());
        make("building the packages", &[&format!("-j{jobs}"), "bindeb-pkg"])
    }
}

/// Checks that a directory is absent, empty or that of an earlier build, so that it may be removed.
fn check_is_of_build(directory: &Path) -> Result<(), LabError> {
    let names = shell::sorted_entries(directory);
    match names.is_empty() || names.iter().any(|name| name == TREE || name == LOG) {
        true => Ok(()),
        false => refuse(format!(
            "{} has other files than those of a build: set another directory with --out",
            directory.display()
        )),
    }
}

/// Copies the source with patches. The caller holds the lock of the cache, whose tree changes.
fn copy_source(
    shell: Shell,
    Source { repository, base, .. }: &Source,
    patches: &[Patch],
    to: &Path,
) -> Result<(), LabError> {
    let files: Vec<PathBuf> = patches.iter().map(|patch| patch.path.clone()).collect();
    let checkout = repository.switch_to(&repository.apply(base, &files)?)?;
    let copy = Command::new("copying the source", "cp")
        .args(["-a", "--reflink=auto"])
        .args([&checkout.path, to]);
    Ok(shell.run(&copy)?)
}

fn refuse<T>(reason: impl Into<String>) -> Result<T, LabError> {
    Err(LabError::Unusable(reason.into()))
}

/// Checks for all tools before the build, so that one error lists all missing packages.
fn check_tools(cross: bool) -> Result<(), LabError> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> =
        env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    let tools = TOOLS.split(' ').chain(cross.then_some(CROSS_COMPILER));
    let mut missing: Vec<&str> = tools
        .map(|tool| tool.split_once(':').unwrap_or((tool, tool)))
        .filter(|(tool, _)| !directories.iter().any(|path| path.join(tool).is_file()))
        .map(|(_, package)| package)
        .collect();
    let headers = HEADERS.iter().filter(|(file, _)| !Path::new(file).is_file());
    missing.extend(headers.map(|(_, package)| *package));
    match missing.as_slice() {
        [] => Ok(()),
        _ => refuse(format!("missing packages: run sudo apt-get install {}", missing.join(" "))),
    }
}

fn running_config() -> Result<(PathBuf, String), LabError> {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let path = PathBuf::from(format!("/boot/config-{release}"));
    if let Ok(text) = fs::read_to_string(&path) {
        return Ok((path, text));
    }
    let compressed = PathBuf::from("/proc/config.gz");
    let text = Command::new("reading the configuration", "zcat").arg(&compressed).query();
    match text {
        Ok(text) => Ok((compressed, text)),
        Err(_) => refuse(format!(
            "cannot read {} or /proc/config.gz: set the configuration with --config",
            path.display()
        )),
    }
}

/// Returns the kernel image packages without debug information.
fn image_packages(directory: &Path) -> Vec<PathBuf> {
    let image = |name: &String| {
        name.starts_with("linux-image-") && name.ends_with(".deb") && !name.contains("-dbg")
    };
    let names = shell::sorted_entries(directory).into_iter().filter(image);
    names.map(|name| directory.join(name)).collect()
}
