//! A rank other than 0: loads its part of the model and runs the steps that it is ordered to. It never samples.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

use crate::plugin::{BackendChoice, DType, Loader};

use super::super::detect::open_model;
use super::super::error::EngineError;
use super::super::kv_types::KvType;
use super::super::load::Precision;
use super::super::part::{Part, Settled, load_part};
use super::super::runner::Runner;
use super::super::thread::STACK_BYTES;
use super::frame;
use super::message::{Answer, Order, Setup, VERSION};

/// For the step under way when rank 0 is gone.
const GRACE: Duration = Duration::from_secs(1);

/// Runs this process as a rank. Its orders come through its standard input, which is one end of a pair of sockets.
/// `loader` makes what loads plugins.
pub fn rank_main(loader: impl FnOnce() -> Result<Loader, String> + Send + 'static) -> ExitCode {
    let link = io::stdin().as_fd().try_clone_to_owned();
    let Ok(mut link) = link.map(UnixStream::from) else {
        return ExitCode::FAILURE;
    };
    let served = std::thread::Builder::new()
        .name("mlxcel-engine".to_owned())
        .stack_size(STACK_BYTES)
        .spawn({
            let link = link.try_clone();
            move || serve(link.map_err(of_link)?, loader)
        });
    let outcome = match served.map(std::thread::JoinHandle::join) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err("it panicked".to_owned()),
        Err(error) => Err(format!("its thread could not be started: {error}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // Rank 0 may be gone.
            let _ = frame::write(&mut link, &Answer::Failed(reason));
            ExitCode::FAILURE
        }
    }
}

fn of_link(error: io::Error) -> String {
    format!("the link to rank 0 failed: {error}")
}

fn serve(
    mut link: UnixStream,
    loader: impl FnOnce() -> Result<Loader, String>,
) -> Result<(), String> {
    let setup = match frame::read::<Order>(&mut link).map_err(of_link)? {
        Some(Order::Load(setup)) => setup,
        Some(Order::Step(..)) => return Err("a step was ordered before a model".to_owned()),
        None => return Ok(()),
    };
    let orders = orders_of(link.try_clone().map_err(of_link)?).map_err(of_link)?;
    let mut runner = load(&setup, &loader()?)?;
    frame::write(&mut link, &Answer::Ready).map_err(of_link)?;
    for order in orders {
        let Order::Step(step) = order else {
            return Err("a second model was ordered".to_owned());
        };
        runner.follow(&step).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Reads orders on a thread of its own, which notices the end of rank 0 while a step waits for it.
fn orders_of(mut link: UnixStream) -> io::Result<Receiver<Order>> {
    let (sender, orders) = channel();
    std::thread::Builder::new()
        .name("mlxcel-orders".to_owned())
        .spawn(move || {
            while let Ok(Some(order)) = frame::read::<Order>(&mut link) {
                if sender.send(order).is_err() {
                    return;
                }
            }
            drop(sender);
            std::thread::sleep(GRACE);
            // Still here: a step waits for a rank that is gone, and no step can be interrupted.
            let own = rustix::process::getpid();
            let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        })?;
    Ok(orders)
}

fn load(setup: &Setup, loader: &Loader) -> Result<Runner, String> {
    if setup.version != VERSION {
        return Err(format!(
            "this program is {VERSION}, rank 0 is {}: the program was replaced while it ran, start again",
            setup.version
        ));
    }
    let text = |error: EngineError| error.to_string();
    let inputs = SearchInputs::from_process(setup.plugin.clone(), setup.plugins_dir.clone());
    let catalogue =
        Catalogue::build(&inputs, HostProfile::CURRENT).map_err(|error| error.to_string())?;
    let pin = Some(setup.family.0.as_str());
    let opened = open_model(&setup.model, &catalogue, loader, pin).map_err(text)?;
    let choice: BackendChoice = setup
        .backend
        .0
        .parse()
        .map_err(|error| format!("{error}"))?;
    let selected = loader
        .select_backend(&catalogue, &choice)
        .map_err(|error| error.to_string())?;
    let found = (
        (opened.family.name(), opened.family.version()),
        opened.decision.arch.as_str(),
        (selected.plugin.name(), selected.plugin.version()),
    );
    let expected = (
        (setup.family.0.as_str(), setup.family.1.as_str()),
        setup.arch.as_str(),
        (setup.backend.0.as_str(), setup.backend.1.as_str()),
    );
    if found != expected {
        return Err(format!(
            "it found {found:?}, rank 0 runs {expected:?}: plugins were replaced meanwhile, start again"
        ));
    }
    let unknown = |what: &str, name: &str| format!("{what} {name} is not known");
    let settled = Settled {
        dtype: DType::from_name(&setup.dtype).ok_or_else(|| unknown("type", &setup.dtype))?,
        kv_type: KvType::from_name(&setup.kv_type)
            .ok_or_else(|| unknown("cache type", &setup.kv_type))?,
        precision: match setup.precision.as_str() {
            "" => None,
            name => Some(Precision::from_name(name).ok_or_else(|| unknown("precision", name))?),
        },
        // Refused where there are ranks.
        deterministic: false,
        threads: setup.threads,
        context_tokens: setup.context_tokens,
        device: setup.device.clone(),
    };
    let part = Part {
        rank: setup.rank,
        addresses: &setup.addresses,
    };
    let (model, _) =
        load_part(&opened, &selected, &settled, Some(part), &|_, _| {}).map_err(text)?;
    let desc = opened.desc.of_rank(setup.addresses.len()).map_err(text)?;
    // Pages are handed out by rank 0.
    let no_tokens = 0;
    Ok(Runner::new(
        model,
        desc,
        settled.context_tokens,
        no_tokens,
        settled.kv_type,
        settled.dtype,
    ))
}
