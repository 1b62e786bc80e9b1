//! Loaded modules by unit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use contract::DeviceError;

use super::build::{CompileProgress, Compiled, Options, compile};
use crate::driver::{Function, Gpu, Module};
use crate::gpu_props::GpuProps;
use crate::launch::{CompileUnit, Launch};

/// All units of a plan, compiled and loaded on one device.
#[derive(Debug)]
pub struct Modules {
    modules: HashMap<CompileUnit, Arc<Module>>,
    /// Functions already looked up.
    functions: RefCell<HashMap<(CompileUnit, &'static str), Function>>,
}

impl Modules {
    /// Compiles `units` for the device and loads them.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if one does not compile, [`DeviceError::DeviceLost`] if one
    /// does not load.
    pub fn compile(
        gpu: &Gpu,
        units: &[CompileUnit],
        options: &Options,
        progress: &mut dyn FnMut(CompileProgress),
    ) -> Result<Modules, DeviceError> {
        let mut modules = HashMap::new();
        let options = options_for(gpu, options);
        for compiled in compile(gpu.arch(), units, &options, progress)? {
            let module = load(gpu, &compiled, &options)?;
            modules.insert(compiled.unit, module);
        }
        Ok(Modules {
            modules,
            functions: RefCell::default(),
        })
    }

    /// The function of a launch, after a check of its arguments and shared memory.
    ///
    /// # Errors
    /// [`DeviceError::InvalidCall`] for a unit that was not compiled, or wrong arguments.
    pub fn function(&self, gpu: &Gpu, launch: &Launch) -> Result<Function, DeviceError> {
        let key = (launch.unit.clone(), launch.entry);
        let known = self.functions.borrow().get(&key).cloned();
        let function = match known {
            Some(function) => function,
            None => {
                let module =
                    self.modules
                        .get(&launch.unit)
                        .ok_or_else(|| DeviceError::InvalidCall {
                            call: "a kernel launch",
                            detail: format!("{} is not among the compiled units", launch.unit),
                        })?;
                let function = Function::find(gpu, module, launch.entry)?;
                self.functions.borrow_mut().insert(key, function.clone());
                function
            }
        };
        function.check_arguments(&launch.args.sizes())?;
        function.enable_dynamic_shared(gpu, launch.shared)?;
        Ok(function)
    }
}

/// The options with what the GPU's class lacks switched off.
fn options_for(gpu: &Gpu, options: &Options) -> Options {
    let mut options = options.clone();
    options.overlap &= gpu.has_pdl();
    let own = GpuProps::new(gpu.info().capability, 1);
    if own.has_wgmma && !gpu.info().props().has_wgmma {
        options.extra.push("-DNO_WGMMA=1".to_owned());
    }
    if gpu.arch().has_pdl() && !gpu.has_pdl() {
        options.extra.push("-DNO_SM90=1".to_owned());
    }
    options
}

/// Loads a unit. If the driver rejects a cached CUBIN, the unit is compiled again.
fn load(gpu: &Gpu, compiled: &Compiled, options: &Options) -> Result<Arc<Module>, DeviceError> {
    let name = compiled.unit.to_string();
    let refused = match Module::load(gpu, &compiled.cubin, &name) {
        Ok(module) => return Ok(module),
        Err(error) => error,
    };
    let Some(file) = &compiled.cached else {
        return Err(refused);
    };
    tracing::warn!(file = %file.display(), %refused, "cached kernel rejected, compiling again");
    // On failure, the new file replaces the old one.
    let _ = std::fs::remove_file(file);
    let again = compile(
        gpu.arch(),
        std::slice::from_ref(&compiled.unit),
        options,
        &mut |_| (),
    )?;
    let again = again.first().ok_or(refused)?;
    Module::load(gpu, &again.cubin, &name)
}

impl Gpu {
    /// Queues a launch on the main stream.
    ///
    /// # Errors
    /// [`DeviceError::DeviceLost`] if the driver rejects it, or for an earlier kernel's fault.
    pub fn run(&self, modules: &Modules, launch: &Launch) -> Result<(), DeviceError> {
        self.run_function(&modules.function(self, launch)?, launch)
    }
}
