// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab check-image`: runs an image without Linux, and checks the stage-2 tables of its guests.
//!
//! The plugin finds the tables by VTTBR_EL2, so the rules of the architecture need nothing else. The
//! options name functions for the rules that need the end of an operation.

use std::{
    fs,
    path::{Path, absolute},
    time::Duration,
};

use granule_stage2::check::machine::Role;
use granule_types::units::Nanoseconds;
use object::{Object, ObjectSymbol, SymbolKind};

use crate::{
    check::{
        Hardware, ObservedSymbol, Places, Setup,
        defect::{Checked, Summary},
        hypervisor::Use,
        observation::{Check, DEFECTS, FIFO, observe},
        report::CheckedJob,
    },
    command::{Command, CommandError},
    error::LabError,
    host::emulator::{self, EmulatedMachine, path_option},
    jobs::run_directory::RunDirectory,
    observing_emulator::find_observing_emulator,
    options::{DefaultPrograms, ImageOptions, RunPath},
    report::{RunStatus, check_report},
    shell::Shell,
};

/// Length of a CPU's turn.
const QUANTUM: Nanoseconds = Nanoseconds(100);
/// Name of the job in reports.
const JOB: &str = "image";

/// Runs an image and publishes the report.
///
/// # Errors
/// The image cannot be run, or none of its guests can be checked.
pub fn check_image(options: &ImageOptions) -> Result<RunStatus, LabError> {
    options.report.suppressions()?;
    let path = &options.image;
    let image = fs::read(path).map_err(|error| CommandError::file("read", path, error))?;
    let symbols = Symbols::read(&image).map_err(|error| {
        LabError::Unusable(format!("{} is no ELF file: {error}", path.display()))
    })?;
    let functions = observed_functions(options, &symbols)?;
    let shell = Shell::new(false);
    let cache = options.locations.cache()?;
    let qemu = find_observing_emulator(shell, &cache, &options.qemu)?;
    let plugin = match &options.plugin {
        Some(plugin) => plugin.clone(),
        None => DefaultPrograms::new()?.plugin,
    };
    let machine = EmulatedMachine {
        cpu: options.cpu.clone(),
        cpus: options.smp,
        memory: options.memory,
        is_sparse: false,
        quantum: Some(QUANTUM),
        costs: None,
        tlb: None,
        counts_functions: false,
        hold: None,
        appended: None,
    };
    emulator::probe(&qemu, &machine, Some(&plugin))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let directory = RunDirectory::create(
        shell,
        &match &options.out {
            Some(out) => RunPath::Given(absolute(out)?),
            None => RunPath::Numbered(absolute("lab-runs")?.join(&name)),
        },
    )?;
    let directory = directory.path();
    let hardware = Hardware { cpu: &options.cpu, cpus: options.smp, memory: options.memory };
    let setup = Setup::of_image(&functions, hardware);
    let places = Places::of_system_map(&symbols.system_map());
    let command = command(options, (&qemu, &plugin), &machine, &functions, directory);
    let check = Check::new(setup, &places);
    let ended = observe(check, directory, options.keep_trace, || command.run())?;
    let checked = Checked::read(&directory.join(DEFECTS)).ok();
    let error = match (ended, &checked) {
        (Err(error), _) => Some(crate::error::with_causes(&error)),
        (Ok(()), checked) => checked.as_ref().and_then(unchecked).map(str::to_owned),
    };
    let job = CheckedJob { kernel: name, job: JOB.to_owned(), needs_guest: false, checked, error };
    let remedy = "run an image that starts a guest";
    let status = check_report::publish_jobs(&options.report, directory, vec![job], remedy);
    eprintln!("lab: run directory: {}", directory.display());
    status
}

/// Returns the reason for which nothing was checked, if so.
fn unchecked(checked: &Checked) -> Option<&'static str> {
    match checked.summary {
        Summary { guests: 0, .. } => {
            Some("it selects no stage-2 table by VTTBR_EL2 with a VMID other than 0")
        }
        Summary { stores: 0, .. } => Some("it changes no table after it has selected it"),
        _ => None,
    }
}

/// Returns the functions that the options name.
fn observed_functions(
    options: &ImageOptions,
    symbols: &Symbols,
) -> Result<Vec<ObservedSymbol>, LabError> {
    let lock = options.lock.iter().map(|lock| (&lock.function, Use::Lock(lock.offset)));
    let calls = options.call.iter().map(|function| (function, Use::Role(Role::Call)));
    let mut functions = Vec::new();
    for ((name, used_for), number) in lock.chain(calls).zip(1..) {
        let Some((start, end)) = symbols.range(name) else {
            return Err(LabError::Unusable(format!(
                "{} has no function '{name}': --lock and --call name functions of its symbol table",
                options.image.display()
            )));
        };
        functions.push(ObservedSymbol { number, name: name.clone(), start, end, used_for });
    }
    Ok(functions)
}

/// Returns the command of the emulator.
fn command(
    options: &ImageOptions,
    (qemu, plugin): (&Path, &Path),
    machine: &EmulatedMachine,
    functions: &[ObservedSymbol],
    directory: &Path,
) -> Command {
    let mut plugin = machine.plugin_option(plugin, &directory.join("counts.jsonl"));
    plugin += &path_option(",trace=", &directory.join(FIFO));
    plugin.extend(functions.iter().map(ObservedSymbol::plugin_arguments));
    let console = path_option("file,id=console,path=", &directory.join("console.log"));
    machine
        .emulator(qemu)
        .args(["-chardev", &console, "-serial", "chardev:console", "-plugin", &plugin])
        .arg("-kernel")
        .arg(&options.image)
        .log(directory.join("emulator.log"))
        .deadline(Duration::from_secs(options.deadline))
}

/// Functions of an image, by address.
#[derive(Debug)]
struct Symbols(Vec<(u64, String)>);

impl Symbols {
    fn read(image: &[u8]) -> Result<Self, object::Error> {
        let file = object::File::parse(image)?;
        let functions = file.symbols().filter(|symbol| {
            // Functions in assembly have no type.
            let has_code = symbol.section_index().is_some() && symbol.is_definition();
            symbol.kind() == SymbolKind::Text || (symbol.kind() == SymbolKind::Unknown && has_code)
        });
        let functions = functions.filter_map(|symbol| {
            let name = symbol.name().ok().filter(|name| !name.is_empty() && !name.starts_with('$'));
            name.map(|name| (symbol.address(), short_name(name)))
        });
        let mut functions: Vec<_> = functions.collect();
        functions.sort();
        Ok(Self(functions))
    }

    /// Returns the addresses of a function.
    fn range(&self, name: &str) -> Option<(u64, u64)> {
        let (start, _) = *self.0.iter().find(|(_, symbol)| symbol == name)?;
        let next = self.0.partition_point(|(address, _)| *address <= start);
        Some((start, self.0.get(next).map_or(start + 4, |(address, _)| *address)))
    }

    /// Formats the functions as the `System.map` of a kernel.
    fn system_map(&self) -> String {
        self.0.iter().map(|(address, name)| format!("{address:016x} T {name}\n")).collect()
    }
}

/// Returns the name of a function as reports print it: of a Rust function, the type or module and the
/// function, without generic arguments.
fn short_name(symbol: &str) -> String {
    let Ok(name) = rustc_demangle::try_demangle(symbol) else { return symbol.to_owned() };
    let name = format!("{name:#}");
    let mut text = name.as_str();
    let mut owner = None;
    // An implementation: `<Type>::function` or `<Type as Trait>::function`.
    if let Some((inside, behind)) = split_angle_brackets(text) {
        owner = Some(inside.split(" as ").next().unwrap_or(inside));
        text = behind.trim_start_matches("::");
    }
    let segments = |text: &str| {
        let mut depth = 0_usize;
        let kept: String = text
            .chars()
            .filter(|c| {
                depth = (depth + usize::from(*c == '<')).saturating_sub(usize::from(*c == '>'));
                depth == 0 && *c != '>'
            })
            .collect();
        let parts = kept.split("::").filter(|part| !part.is_empty());
        parts.map(|part| part.replace([' ', ','], "")).collect::<Vec<_>>()
    };
    let mut path = owner.map(segments).unwrap_or_default();
    path.drain(..path.len().saturating_sub(1));
    path.extend(segments(text));
    path.drain(..path.len().saturating_sub(2));
    path.join("::")
}

/// Splits `<inside>behind`.
fn split_angle_brackets(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0_usize;
    for (index, c) in text.strip_prefix('<').map(|_| text)?.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if depth == 1 => return Some((&text[1..index], &text[index + 1..])),
            '>' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_two_parts_and_no_generic_arguments() {
        for (symbol, expected) in [
            ("small_hypervisor_lock", "small_hypervisor_lock"),
            (
                "_ZN16small_hypervisor10hypervisor7with_vm17h0123456789abcdefE",
                "hypervisor::with_vm",
            ),
            (
                "_ZN75_$LT$small..engine..Table$LT$_$GT$$u20$as$u20$small..guest_table..Guest$GT$\
                 5unmap17h0123456789abcdefE",
                "Table::unmap",
            ),
            (
                "_ZN14aarch64_paging20Mapping$LT$T$C$R$GT$9map_range17h0123456789abcdefE",
                "Mapping::map_range",
            ),
        ] {
            assert_eq!(short_name(symbol), expected);
        }
    }

    #[test]
    fn a_file_that_is_no_image_is_refused() {
        let error = Symbols::read(b"no ELF").unwrap_err().to_string();

        assert!(error.contains("magic"), "{error}");
    }

    #[test]
    fn a_function_ends_where_the_next_one_starts() {
        let symbols = Symbols(vec![(0x100, "a".to_owned()), (0x140, "b".to_owned())]);

        assert_eq!(symbols.range("a"), Some((0x100, 0x140)));
        assert_eq!(symbols.range("c"), None);
        assert_eq!(symbols.system_map(), "0000000000000100 T a\n0000000000000140 T b\n");
    }
}
