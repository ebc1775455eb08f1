// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The compiler of a kernel build, and the `make` variables that select it.
//!
//! `LLVM=1` selects clang and its linker, as in the kernel's own build; without it, gcc compiles,
//! by the cross compiler of Debian's name unless this machine is arm64 and has none. If `ccache` is
//! installed, compilers run under it, which has no effect on the results.
//!
//! `make` does not inherit variables that change a build: they are no part of a kernel's key.

use std::{env, ffi::OsString, fs, path::Path};

use crate::{
    command::{Command, CommandError},
    shell::Shell,
    values::MakeVariable,
};

/// Prefix of the cross compiler, and of Debian's native compiler.
const CROSS_COMPILE: &str = "aarch64-linux-gnu-";

/// Variables of the environment that change a kernel build (`Documentation/kbuild`), besides those
/// with a prefix of [`BUILD_PREFIXES`]. Variables of ccache and the search path are inherited.
const BUILD_VARIABLES: &str = "ARCH SUBARCH CROSS_COMPILE CROSS_COMPILE_COMPAT LLVM LLVM_IAS CC LD \
    AR AS NM CPP STRIP OBJCOPY OBJDUMP READELF PAHOLE RUSTC CFLAGS CPPFLAGS LDFLAGS AFLAGS \
    KCFLAGS KCPPFLAGS KAFLAGS KRUSTFLAGS CFLAGS_KERNEL AFLAGS_KERNEL CFLAGS_MODULE AFLAGS_MODULE \
    LDFLAGS_MODULE LDFLAGS_vmlinux CFLAGS_GCOV EXTRA_CFLAGS USERCFLAGS USERLDFLAGS LOCALVERSION \
    MAKEFLAGS MFLAGS GNUMAKEFLAGS MAKEOVERRIDES MAKEFILES MAKELEVEL O W C V CF CHECK CPATH \
    C_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX OUTPUT KHDR_INCLUDES \
    INSTALL_HDR_PATH";

const BUILD_PREFIXES: [&str; 3] = ["KCONFIG_", "KBUILD_", "HOST"];

/// Variables that `make` sets for the programs that it starts.
const UNREPORTED: [&str; 5] = ["MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL"];

/// Messages of a compiler or of `make` that does not fail because of a source.
const FAILURES_OF_MACHINE: [&str; 4] =
    ["Killed", "Terminated", "No space left on device", "Cannot allocate memory"];

/// Target of clang for programs.
const TARGET: &str = "aarch64-linux-gnu";

/// Compiler of a build, identified by the version of its programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toolchain {
    /// First lines of the compiler's and the linker's `--version`.
    pub version: String,
    arguments: Vec<String>,
    /// Variable of `make` that selects clang for programs, whose Makefiles set no target if `CC` is
    /// a variable of the command line.
    pub program_compiler: Option<String>,
}

impl Toolchain {
    /// Returns the toolchain that variables of `make` select; of equal names, the last one counts.
    pub fn new(shell: Shell, variables: &[MakeVariable]) -> Result<Self, CommandError> {
        let value = |name: &str| {
            let mut last = variables.iter().rev();
            last.find(|variable| variable.name == name).map(|variable| variable.value.as_str())
        };
        let prefix = cross_compile_prefix(cfg!(target_arch = "aarch64"), is_installed);
        // `LLVM=-15` selects clang-15, `LLVM=/usr/lib/llvm-15/bin/` that directory.
        let llvm = value("LLVM").filter(|value| !value.is_empty());
        let tool = |name: &str, gnu: &str| match llvm {
            Some(suffix) if suffix.starts_with('-') => format!("{name}{suffix}"),
            Some(directory) if directory.ends_with('/') => format!("{directory}{name}"),
            Some(_) => name.to_owned(),
            None => format!("{prefix}{gnu}"),
        };
        let compiler = value("CC").map_or_else(|| tool("clang", "gcc"), str::to_owned);
        let linker = value("LD").map_or_else(|| tool("ld.lld", "ld"), str::to_owned);
        let mut version = Vec::new();
        for program in [&compiler, &linker] {
            let mut words = program.split_ascii_whitespace();
            let query = Command::new("querying the compiler", words.next().unwrap_or_default())
                .args(words)
                .arg("--version")
                .query();
            match query {
                Err(_) if shell.is_dry_run() => {}
                text => version.extend(text?.lines().next().map(str::to_owned)),
            }
        }
        let mut arguments = vec!["ARCH=arm64".to_owned(), format!("CROSS_COMPILE={prefix}")];
        arguments
            .extend(variables.iter().map(|MakeVariable { name, value }| format!("{name}={value}")));
        let cached = if is_installed("ccache") { "ccache " } else { "" };
        if value("CC").is_none() && !cached.is_empty() {
            arguments.push(format!("CC={cached}{compiler}"));
        }
        let uses_clang = llvm.is_some() && value("CC").is_none();
        let program_compiler =
            uses_clang.then(|| format!("CC={cached}{compiler} --target={TARGET} -fuse-ld=lld"));
        Ok(Self { version: version.join(", "), arguments, program_compiler })
    }

    /// Returns the `make` command for an arm64 kernel tree. Build properties in the image that vary
    /// between machines have fixed values.
    pub fn make(&self, task: &str, tree: &Path) -> Command {
        self.make_with(task, tree, &["-s"])
    }

    /// Returns the command of [`Toolchain::make`], which prints the name of each object before the
    /// compiler's messages.
    pub fn verbose_make(&self, task: &str, tree: &Path) -> Command {
        self.make_with(task, tree, &["--no-print-directory", "--output-sync=target"])
    }

    fn make_with(&self, task: &str, tree: &Path, flags: &[&str]) -> Command {
        Command::new(task, "make")
            .without_envs(build_environment())
            .env("KBUILD_BUILD_TIMESTAMP", "2000-01-01")
            .env("KBUILD_BUILD_USER", "granule")
            .env("KBUILD_BUILD_HOST", "lab")
            .env("KBUILD_BUILD_VERSION", "1")
            .env("LOCALVERSION", "")
            .args(flags)
            .arg("-C")
            .arg(tree)
            .args(&self.arguments)
    }
}

/// Returns the names of the variables of the environment that would change a build.
pub fn build_environment() -> Vec<OsString> {
    let names = env::vars_os().map(|(name, _)| name);
    let mut names: Vec<OsString> =
        names.filter(|name| name.to_str().is_some_and(is_build_variable)).collect();
    names.sort();
    names
}

fn is_build_variable(name: &str) -> bool {
    let has_prefix = BUILD_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let is_of_shell = matches!(name, "HOSTNAME" | "HOSTTYPE" | "HOST");
    (has_prefix && !is_of_shell) || BUILD_VARIABLES.split(' ').any(|variable| variable == name)
}

/// Returns a message about variables of the environment that builds do not use.
pub fn environment_remark() -> Option<String> {
    let names = build_environment();
    let reported = |name: &OsString| !UNREPORTED.iter().any(|unreported| name == unreported);
    let names: Vec<_> =
        names.iter().filter(|name| reported(name)).map(|name| name.to_string_lossy()).collect();
    match names.as_slice() {
        [] => None,
        [name] => Some(format!("{name} of the environment is not used: set it with --make")),
        names => Some(format!(
            "{} of the environment are not used: set them with --make",
            names.join(", ")
        )),
    }
}

/// Returns the prefix of the programs for arm64; `is_native` indicates an arm64 machine.
fn cross_compile_prefix(is_native: bool, is_installed: impl Fn(&str) -> bool) -> &'static str {
    if is_native && !is_installed(&format!("{CROSS_COMPILE}gcc")) { "" } else { CROSS_COMPILE }
}

/// Reports whether a program is in the search path.
pub fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the number of parallel compilers: one for each CPU.
pub fn parallel_jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Reports whether a build by `make` failed because of its sources only, and has built the others if it
/// keeps going. Otherwise a repetition may succeed, so the result must not be kept.
pub fn is_of_sources(error: &CommandError, log: &Path) -> bool {
    // make exits with 2 after an error.
    let is_of_make =
        matches!(error, CommandError::Failed { status, .. } if status == "exit code 2");
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    is_of_make && !FAILURES_OF_MACHINE.iter().any(|message| log.contains(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_selected_compiler() {
        let variables = ["CC=echo one", "LD=echo two"].map(|text| text.parse().unwrap());

        let toolchain = Toolchain::new(Shell::new(false), &variables).unwrap();

        assert_eq!(toolchain.version, "one --version, two --version");
        let make = toolchain.make("x", Path::new("/t")).to_string();
        assert!(make.contains("ARCH=arm64") && make.contains("'CC=echo one'"), "{make}");
    }

    #[test]
    fn variables_that_change_a_build_are_not_inherited() {
        for name in ["KCFLAGS", "LLVM", "MAKEFLAGS", "KCONFIG_ALLCONFIG", "HOSTCC", "KBUILD_CFLAGS"]
        {
            assert!(is_build_variable(name), "{name}");
        }
        for name in ["PATH", "HOME", "CCACHE_DIR", "HOSTNAME", "TMPDIR", "LANG"] {
            assert!(!is_build_variable(name), "{name}");
        }
    }

    #[test]
    fn an_arm64_machine_without_prefixed_programs_uses_its_own() {
        assert_eq!(cross_compile_prefix(true, |_| false), "");
        assert_eq!(
            cross_compile_prefix(true, |program| program == "aarch64-linux-gnu-gcc"),
            "aarch64-linux-gnu-"
        );
        assert_eq!(cross_compile_prefix(false, |_| false), "aarch64-linux-gnu-");
    }

    #[test]
    fn a_missing_compiler_is_an_error_except_in_a_dry_run() {
        let variables = ["CC=no-such-compiler".parse().unwrap()];

        assert!(Toolchain::new(Shell::new(false), &variables).is_err());
        assert!(Toolchain::new(Shell::new(true), &variables).is_ok());
    }

    #[test]
    fn a_build_that_a_signal_ended_is_not_of_sources() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        for (script, expected) in [
            ("echo 'a.c:1:2: error: x'; exit 2", true),
            ("kill -9 $$", false),
            ("echo 'gcc: fatal error: Killed signal terminated program cc1'; exit 2", false),
            ("echo '/tmp/a.s: No space left on device'; exit 2", false),
        ] {
            let _ = fs::remove_file(&log);
            let build = Command::new("building", "sh").args(["-c", script]).log(&log);

            let error = build.run().unwrap_err();

            assert_eq!(is_of_sources(&error, &log), expected, "{script}");
        }
    }
}
