from benchmarks.calibration.command import app

app()
