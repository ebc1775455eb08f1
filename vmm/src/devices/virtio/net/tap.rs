// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A tap interface of the host's: what is written to it arrives at the host as a packet.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
};

use thiserror::Error;
use vmm_sys_util::ioctl::{ioctl_with_ref, ioctl_with_val};

use super::HEADER;

/// Why a tap cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// No interface can have this name.
    #[error(
        "'{0}' cannot be the name of a tap: it takes 1 to 15 characters, none of them a blank, a \
         slash or a percent sign"
    )]
    Name(String),
    /// The host does not let us.
    #[error("the tap {name} cannot be used ({doing}){advice}")]
    Open {
        /// The tap.
        name: String,
        /// What was tried.
        doing: &'static str,
        /// What to do, if that is known.
        advice: String,
        /// Why.
        source: io::Error,
    },
}

/// An open tap.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    /// Whether it can be told which offloads the guest takes.
    agrees: bool,
}

impl Tap {
    /// Attaches to the tap of this name; one that does not exist is made for as long as the
    /// process lives, if it has the right to.
    ///
    /// # Errors
    /// The name is no name, or the kernel refuses.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let bytes = name.as_bytes();
        let odd = |byte: &u8| !byte.is_ascii_graphic() || b"/%".contains(byte);
        if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.iter().any(odd) {
            return Err(TapError::Name(name.to_owned()));
        }
        let refused = |doing, source: io::Error| TapError::Open {
            name: name.to_owned(),
            doing,
            advice: advice(name, &source),
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|source| refused("opening /dev/net/tun", source))?;
        // SAFETY: all zeros is a valid request: an empty name and no flags.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
            *place = libc::c_char::from_ne_bytes([*byte]);
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        // SAFETY: the request is a whole `struct ifreq`, read by the kernel during the call.
        let done = unsafe { ioctl_with_ref(&file, request_number(libc::TUNSETIFF), &request) };
        check(done).map_err(|source| refused("TUNSETIFF", source))?;
        let size = libc::c_int::try_from(HEADER).unwrap_or(0);
        let number = request_number(libc::TUNSETVNETHDRSZ);
        // SAFETY: the kernel reads an int during the call.
        let done = unsafe { ioctl_with_ref(&file, number, &size) };
        check(done).map_err(|source| refused("TUNSETVNETHDRSZ", source))?;
        Ok(Self {
            file,
            name: name.to_owned(),
            agrees: true,
        })
    }

    /// Takes another descriptor for a tap: a packet, its header in front, is what one read gives
    /// and one write takes, and neither blocks. It is asked for no offloads.
    #[must_use]
    pub fn from_fd(packets: OwnedFd, name: &str) -> Self {
        Self {
            file: packets.into(),
            name: name.to_owned(),
            agrees: false,
        }
    }

    /// The same tap, open once for both.
    ///
    /// # Errors
    /// The host has no descriptor to give.
    pub fn try_clone(&self) -> Result<Self, TapError> {
        let file = self.file.try_clone().map_err(|source| TapError::Open {
            name: self.name.clone(),
            doing: "copying its descriptor",
            advice: String::new(),
            source,
        })?;
        Ok(Self {
            file,
            name: self.name.clone(),
            agrees: self.agrees,
        })
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Says which offloads the guest takes: the kernel hands it nothing else.
    pub(super) fn set_offloads(&self, flags: libc::c_uint) -> io::Result<()> {
        if !self.agrees {
            return Ok(());
        }
        let number = request_number(libc::TUNSETOFFLOAD);
        // SAFETY: the argument is a number.
        check(unsafe { ioctl_with_val(&self.file, number, libc::c_ulong::from(flags)) })
    }
}

#[cfg(test)]
impl Tap {
    /// Two ends of a socket that keeps packets apart: one stands for the tap, and what the host
    /// would see of it comes out of the other.
    pub(in crate::devices) fn pair() -> (Self, std::os::unix::net::UnixDatagram) {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        (Self::from_fd(tap.into(), "a pair"), host)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.file.as_raw_fd()
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The C libraries differ in the type.
#[allow(
    clippy::unnecessary_cast,
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation
)]
const fn request_number(number: libc::Ioctl) -> libc::c_ulong {
    number as u32 as libc::c_ulong
}

fn advice(name: &str, source: &io::Error) -> String {
    match source.raw_os_error() {
        Some(libc::EBUSY) => ": another program uses it".to_owned(),
        Some(libc::EPERM | libc::EACCES) => format!(
            ": make it beforehand with 'ip tuntap add dev {name} mode tap vnet_hdr user USER', as \
             root"
        ),
        Some(libc::EINVAL) => {
            ": it exists and is no tap, or takes several queues; make another".to_owned()
        }
        Some(libc::ENOENT | libc::ENODEV) => {
            ": the kernel has no tun driver; try 'modprobe tun'".to_owned()
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_can_have_are_refused() {
        for name in ["", "sixteen-bytes-xx", "a b", "a/b", "tap%d", "tap\0"] {
            assert!(matches!(Tap::open(name), Err(TapError::Name(_))), "{name}");
        }
    }
}
