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
    env, fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{
    command::{Command, CommandError},
    kernel::{
        prepare::{self, KernelError},
        series::SeriesError,
        stacks::all_patches,
    },
    options::Kernels,
    shell::{Shell, absolute},
};

/// Options of the packages.
#[derive(Debug, Clone)]
pub struct PackageOptions {
    /// The repository.
    pub root: PathBuf,
    /// The cache of sources.
    pub cache: PathBuf,
    /// Linux version of the base.
    pub base: String,
    /// The series.
    pub series: String,
    /// A clean tree of the base; Debian's source if absent.
    pub source: Option<PathBuf>,
    /// Configuration; that of the running kernel if absent.
    pub config: Option<PathBuf>,
    /// Output directory.
    pub out: PathBuf,
    /// Number of compilers at a time.
    pub jobs: u32,
    /// Build the base.
    pub plain: bool,
    /// Build the base with the series.
    pub patched: bool,
    /// Print the build as shell and execute nothing.
    pub dry_run: bool,
}

/// Error returned when the packages cannot be built.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum PackageError {
    #[error("missing packages: run sudo apt-get install {0}")]
    MissingTools(String),
    #[error("this machine is not arm64: set the configuration of an arm64 server with --config")]
    NotArm64,
    #[error("cannot read {0} or /proc/config.gz: set the configuration with --config")]
    NoConfig(PathBuf),
    #[error("{0} is not an arm64 configuration")]
    ForeignConfig(PathBuf),
    #[error("{0} has no CONFIG_KVM=y")]
    NoKvm(PathBuf),
    #[error("'{0}' is not a Linux source tree")]
    NotLinux(PathBuf),
    #[error("'{tree}' is Linux {found}, but the series is for {base}")]
    OtherVersion { tree: PathBuf, found: String, base: String },
    #[error("'{0}' contains build results: set a clean tree with --source")]
    NotClean(PathBuf),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Series(#[from] SeriesError),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Build tools, with their Debian package if its name differs.
const TOOLS: &str = "make gcc bc flex bison rsync cpio patch perl python3 fakeroot depmod:kmod \
                     dpkg-buildpackage:dpkg-dev";
const CROSS_COMPILER: &str = "aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu";
const HEADERS: [(&str, &str); 2] =
    [("/usr/include/libelf.h", "libelf-dev"), ("/usr/include/openssl/ssl.h", "libssl-dev")];

/// Builds the packages and returns their paths.
pub fn build(options: &PackageOptions) -> Result<Vec<PathBuf>, PackageError> {
    let shell = Shell::new(options.dry_run);
    let linux = options.root.join("stage2/linux");
    let patches = all_patches(&linux, &options.base, &options.series)?;
    let cross = !cfg!(target_arch = "aarch64");
    if cross && options.config.is_none() {
        return Err(PackageError::NotArm64);
    }
    if !options.dry_run {
        check_tools(cross)?;
    }
    let config = config(options)?;
    if let Some(source) = &options.source {
        check_source(source, &options.base)?;
    }
    let out = absolute(&options.out)?;
    shell.create_dir(&out)?;
    let mut packages = Vec::new();
    for (name, wanted, patches) in
        [("plain", options.plain, &[][..]), (&options.series, options.patched, &patches)]
    {
        if !wanted {
            continue;
        }
        let directory = out.join(name);
        let tree = directory.join("linux");
        shell.remove_dir(&directory)?;
        shell.create_dir(&directory)?;
        copy_source(shell, options, &tree)?;
        for patch in patches {
            let apply = Command::new(format!("applying {}", patch.path.display()), "patch")
                .arg(format!("--directory={}", tree.display()))
                .args(["--strip=1", "--forward", "--silent"])
                .arg(format!("--input={}", patch.path.display()));
            shell.run(&apply)?;
        }
        let target = (name, directory.as_path());
        compile(shell, target, &config, cross, options.jobs)?;
        packages.extend(images(&directory));
    }
    Ok(packages)
}

/// Checks for all tools at once, instead of one failed build after another.
fn check_tools(cross: bool) -> Result<(), PackageError> {
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
    if missing.is_empty() { Ok(()) } else { Err(PackageError::MissingTools(missing.join(" "))) }
}

/// Returns the configuration: a path and its content.
fn config(options: &PackageOptions) -> Result<(PathBuf, String), PackageError> {
    let (path, text) = match &options.config {
        Some(path) => {
            let text = fs::read_to_string(path);
            let text = text.map_err(|e| CommandError::file("read the configuration", path, e));
            (path.clone(), text?)
        }
        None => running_config()?,
    };
    let has = |setting: &str| text.lines().any(|line| line == setting);
    if !has("CONFIG_ARM64=y") {
        return Err(PackageError::ForeignConfig(path));
    }
    if !has("CONFIG_KVM=y") {
        return Err(PackageError::NoKvm(path));
    }
    Ok((path, text))
}

/// Returns the configuration of the running kernel.
fn running_config() -> Result<(PathBuf, String), PackageError> {
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
        Err(_) => Err(PackageError::NoConfig(path)),
    }
}

fn check_source(tree: &Path, base: &str) -> Result<(), PackageError> {
    let makefile = fs::read_to_string(tree.join("Makefile"));
    let (Ok(makefile), true) = (makefile, tree.join("arch/arm64").is_dir()) else {
        return Err(PackageError::NotLinux(tree.to_owned()));
    };
    let value = |name: &str| {
        let mut lines = makefile.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))
    };
    let number = |name| value(name).unwrap_or_default();
    let found = format!("{}.{}", number("VERSION"), number("PATCHLEVEL"));
    if found != base {
        return Err(PackageError::OtherVersion {
            tree: tree.to_owned(),
            found,
            base: base.to_owned(),
        });
    }
    if tree.join("vmlinux").exists() {
        return Err(PackageError::NotClean(tree.to_owned()));
    }
    Ok(())
}

/// Copies the source. The cache stays locked meanwhile: the lab patches its tree in place.
fn copy_source(shell: Shell, options: &PackageOptions, tree: &Path) -> Result<(), PackageError> {
    let copy = |source: &Path| {
        let copy = Command::new("copying the source", "cp")
            .args(["-a", "--reflink=auto"])
            .args([source, tree]);
        shell.run(&copy)
    };
    if let Some(source) = &options.source {
        return Ok(copy(source)?);
    }
    let _lock = prepare::lock(shell, &options.cache)?;
    let source = prepare::plain_tree(shell, &options.cache, &Kernels::of_base(&options.base))?;
    if !options.dry_run {
        check_source(&source, &options.base)?;
    }
    Ok(copy(&source)?)
}

/// Configures and builds the packages. Signing keys that only the distribution has and debug data,
/// which takes tens of gigabytes, are disabled.
fn compile(
    shell: Shell,
    (name, directory): (&str, &Path),
    (config, config_text): &(PathBuf, String),
    cross: bool,
    jobs: u32,
) -> Result<(), CommandError> {
    let tree = directory.join("linux");
    let file = tree.join(".config");
    if config.extension().is_some_and(|e| e == "gz") {
        shell.write(&file, config_text)?;
    } else {
        shell.copy(config, &file)?;
    }
    let log = directory.join("build.log");
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
        let cross = cross.then_some("CROSS_COMPILE=aarch64-linux-gnu-");
        let make = Command::new(task, "make")
            .arg("-C")
            .arg(&tree)
            .arg("ARCH=arm64")
            .args(cross)
            .args(arguments)
            .log(&log);
        shell.run(&make)
    };
    if !shell.is_dry() {
        eprintln!("host-kernel: building '{name}'; log: {}", log.display());
    }
    make("configuring", &["olddefconfig"])?;
    let jobs = format!("-j{jobs}");
    make("building the packages", &[&jobs, "bindeb-pkg"])
}

/// Returns the packages with a kernel image and without debug data.
fn images(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries
        .filter_map(|entry: io::Result<_>| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("linux-image-") && name.ends_with(".deb") && !name.contains("-dbg")
        })
        .collect()
}
