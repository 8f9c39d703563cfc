"""structvi where people already are; import what you need, each names the extra it takes.

structvi.integrations.lightning    BayesianModule                        pip install "structvi[lightning]"
structvi.integrations.sklearn      BayesianRegressor, BayesianClassifier pip install "structvi[sklearn]"
structvi.integrations.botorch    PosteriorModel                       pip install "structvi[botorch]"
structvi.integrations.export       export_predictive                     torch alone
"""
